"""Evaluations between passes of training, in the precision that the script asks for there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_scripts import batches, check, plainly
from torch import nn

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def evaluated() -> list[float]:
    """Losses, and what the model gives under no autocast and under one, each with its dtype."""
    torch.manual_seed(1)
    model, found = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x in batches(8, 8, 8):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        with torch.no_grad():
            whole = model(x)
            with torch.autocast("cpu", torch.bfloat16):
                half = model(x)
        for one in (whole, half):
            found += [one.double().abs().sum().item(), float(one.dtype is torch.float32)]
    return found


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_evaluations_are_in_that_of_the_script(world_pool: Any, strategy: str) -> None:
    check(world_pool(2).run(plainly, strategy, evaluated), evaluated)


@pytest.mark.parametrize("strategy", ["fsdp", "accelerate"])
def test_where_a_strategy_rounds_weights_by_itself_a_warning_says_so(
    world_pool: Any, strategy: str
) -> None:
    (found, told), _ = world_pool(2).run(plainly, strategy, evaluated)
    assert len(found) == len(evaluated())
    assert [line for line in told if "computed in half precision as training is" in line], told


def within_a_step() -> list[float]:
    """Losses, and what the model gives between the backward passes of a step."""
    torch.manual_seed(1)
    model, found = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x in batches(8, 8, 8):
        for part in (x, x + 1):
            loss = model(part).square().mean() / 2
            loss.backward()
            found.append(loss.item())
            model.eval()
            with torch.no_grad():
                found.append(model(x).sum().item())
            model.train()
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("strategy", ["fsdp", "zero2", "zero3:persistence_threshold=0"])
def test_a_step_goes_on_after_one(world_pool: Any, strategy: str) -> None:
    check(world_pool(2).run(plainly, strategy, within_a_step), within_a_step)
