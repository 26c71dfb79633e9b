"""Groups of an engine's optimizer that a user changes between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from unipar import Session
from unipar.data.batch import Batch, MicroBatch
from unipar.errors import ConfigError
from unipar.state import is_dtensor
from unipar.testing.pool import WorldPools
from unipar.world import Placement

pytestmark = pytest.mark.slow
BATCH = Batch((MicroBatch(torch.ones(1, 2), 1),), 2)


def by_layers(named: Any) -> torch.optim.Optimizer:
    held = list(named)
    layers = [[p for name, p in held if name[0] == layer] for layer in "01"]
    return torch.optim.SGD([{"params": one} for one in layers], lr=0.1)


def frozen(placement: Placement, strategy: str, by_hand: bool) -> tuple[str, bool]:
    """Take a layer out of training: what is told, and whether it is trained even so."""
    with Session(strategy, device="cpu", placement=placement) as session:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        engine = session.prepare(model, optimizer=by_layers)

        def square(model: Any, inputs: torch.Tensor) -> torch.Tensor:
            return model(inputs).square().mean()

        def step() -> None:
            if by_hand:
                engine.backward(square(engine, torch.ones(1, 2)), num_items=1)
                engine.step()
            else:
                engine.train_step(BATCH, square)

        step()
        before = read(engine)
        assert engine.optimizer is not None
        engine.optimizer.param_groups.pop(0)
        try:
            step()
        except ConfigError as error:
            return str(error), before != read(engine)
        return "", before != read(engine)


def read(engine: Any) -> list[float]:
    weights = [p.detach() for p in engine.module[0].parameters()]
    return [(p.to_local() if is_dtensor(p) else p).sum().item() for p in weights]


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ddp:shard_optimizer=true", "zero1", "zero2"])
def test_a_group_that_is_taken_out_is_not_trained(
    strategy: str, by_hand: bool, world_pool: WorldPools
) -> None:
    for told, changed in world_pool(2).run(frozen, strategy, by_hand):
        assert not changed
        if strategy in ("ddp", "fsdp"):
            assert not told
        else:
            assert "param_groups hold other parameters than when the model and its" in told
