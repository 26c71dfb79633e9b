"""A gradient that is not finite on one rank: no rank steps, and all say so in the next step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import unipar
from unipar import ConfigError, NonFiniteLossError
from unipar.data.batch import Batch, MicroBatch
from unipar.testing.models import with_infinite_gradient
from unipar.testing.pool import WorldPools
from unipar.world import Placement


def loss_fn(model: Any, data: tuple[torch.Tensor, bool]) -> torch.Tensor:
    loss = model(data[0]).square().mean()
    return with_infinite_gradient(loss) if data[1] else loss


def train(placement: Placement, strategy: str, steps: list[bool], alone: bool) -> tuple[Any, Any]:
    """Step after step, of which some have an infinite gradient on rank 1.

    Returns:
        What was raised, with the number of steps taken by then; and the weights at the end.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    raised: list[tuple[str, int]] = []
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(
            model,
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.1, fused=True),
            max_grad_norm=1.0,
        )
        for sudden in steps:
            data = torch.randn(2, 4), sudden and placement.rank == 1
            try:
                result = engine.train_step(Batch((MicroBatch(data, 2),), 4), loss_fn)
                if alone and placement.rank == 0:
                    _ = result.loss
            except (ConfigError, NonFiniteLossError) as error:
                raised.append((str(error), engine.num_steps))
                if isinstance(error, ConfigError):
                    if placement.rank == 1:
                        with pytest.raises(NonFiniteLossError):
                            engine.check_last_step()
                    break
        weights = {
            name: (one.full_tensor() if isinstance(one, DTensor) else one).clone()
            for name, one in engine.module.state_dict().items()
        }
    return raised, weights


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_no_rank_steps_and_all_say_so_in_the_next_step(
    world_pool: WorldPools, strategy: str
) -> None:
    for raised, weights in world_pool(2).run(train, strategy, [False, True, False, False], False):
        ((message, num_steps),) = raised
        assert "the gradient norm of step 2 is not finite" in message
        assert num_steps == 1
        assert all(tensor.isfinite().all() for tensor in weights.values())


def test_a_rank_that_alone_reads_and_goes_on_does_not_train_alone(world_pool: WorldPools) -> None:
    (first, own), (second, others) = world_pool(2).run(train, "ddp", [False, True, False], True)
    assert "gradient norm of step 2" in first[0][0]
    assert "rank 0 in its step 4 (1 of them given up), rank 1 in its step 3" in first[1][0]
    assert [message for message, _ in second] == [first[1][0]]
    assert all(torch.equal(own[name], others[name]) for name in own)
