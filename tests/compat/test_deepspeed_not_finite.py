"""A loss of one rank that is not finite, as DeepSpeed's configuration has it trained."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from faces import under
from torch import nn

from unipar.compat import deepspeed
from unipar.compat.run import current
from unipar.errors import NonFiniteLossError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def train(config: dict[str, Any]) -> tuple[list[float], str]:
    """Norms of steps, of which rank 1's second loss is infinite; and the error that ends them."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={"train_micro_batch_size_per_gpu": 2, **config},
    )
    norms: list[float] = []
    try:
        for number in range(3):
            x = torch.ones(2, 4)
            if number == 1 and current.placement().rank == 1:
                x[0, 0] = math.inf
            engine.backward(engine(x).float().square().mean())
            engine.step()
            norm = engine.get_global_grad_norm()
            assert norm is not None
            norms.append(norm)
            assert engine.was_step_applied() == math.isfinite(norm)
    except NonFiniteLossError as error:
        return norms, str(error)
    assert (engine.global_steps, engine.skipped_steps) == (3, 1)
    return norms, ""


@pytest.mark.parametrize(
    ("strategy", "config"),
    [
        (None, {"zero_optimization": {"stage": 1}}),
        (None, {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}),
        ("ddp", {"fp16": {"enabled": True, "initial_scale_power": 4}}),
        ("fsdp", {"fp16": {"enabled": True, "initial_scale_power": 4}}),
    ],
)
def test_it_leaves_the_step_out_as_deepspeed_does(
    world_pool: Any, strategy: str | None, config: dict[str, Any]
) -> None:
    for norms, error in world_pool(2).run(under, strategy, train, config):
        assert not error
        assert [math.isfinite(one) for one in norms] == [True, False, True]
        assert norms[1] == math.inf


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_elsewhere_it_ends_the_run_and_says_how_it_would_not(
    world_pool: Any, strategy: str
) -> None:
    config = {"zero_optimization": {"stage": 2}}
    for norms, error in world_pool(2).run(under, strategy, train, config):
        assert len(norms) == 1
        assert "the loss of step 2 is not finite" in error
        assert "set on_nan: skip in unipar.yaml to leave such batches out" in error
