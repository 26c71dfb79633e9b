"""Optimizers that have state when a script prepares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from faces import under
from torch import nn

from unipar.compat.accelerate import Accelerator
from unipar.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DATA = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(0))


class Averaging(torch.optim.Optimizer):
    """It makes its state in its constructor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["mean"] = torch.full_like(parameter, 0.01)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter]["mean"].lerp_(parameter.grad, 0.5)
                parameter.sub_(group["lr"] * mean)


def prepared(kind: Any, *, stepped: bool = False) -> tuple[Accelerator, Any, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = kind(
        [{"params": model[0].parameters(), "lr": 0.05}, {"params": model[2].parameters()}]
    )
    if stepped:
        model(DATA[0]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    accelerator = Accelerator()
    return accelerator, *accelerator.prepare(model, optimizer)


def trained(kind: Any, directory: str) -> list[float]:
    """The losses of a run, and of its second half once more, from its checkpoint."""
    accelerator, model, optimizer = prepared(kind)
    losses = []

    def steps(first: int) -> None:
        for x in DATA[first : first + 3]:
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    steps(0)
    accelerator.save_state(directory)
    steps(3)
    accelerator.load_state(directory)
    steps(3)
    return losses


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.1)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        (adagrad, "fsdp"),
        (adagrad, "zero2"),
        (adagrad, "zero3:persistence_threshold=0"),
        (Averaging, "fsdp"),
        (Averaging, "ddp:shard_optimizer=true"),
    ],
)
def test_state_that_a_constructor_makes_is_none_of_training(
    world_pool: Any, tmp_path: Path, kind: Any, strategy: str
) -> None:
    expected = world_pool(2).run(under, "ddp", trained, kind, str(tmp_path / "whole"))
    found = world_pool(2).run(under, strategy, trained, kind, str(tmp_path / "divided"))
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
        assert one[3:6] == one[6:]


def refusal() -> list[str]:
    said = []
    for kind in (torch.optim.AdamW, torch.optim.Adagrad):
        with pytest.raises(ConfigError) as refused:
            prepared(kind, stepped=True)
        said.append(str(refused.value))
    return said


@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "zero3", "ddp:shard_optimizer=true"])
def test_state_that_training_has_made_is_not_lost(world_pool: Any, strategy: str) -> None:
    for said in world_pool(2).run(under, strategy, refusal):
        for kind, message in zip(("AdamW", "Adagrad"), said, strict=True):
            assert f"the {kind} has state already" in message
            assert "Prepare it before its first step; load_state restores" in message
