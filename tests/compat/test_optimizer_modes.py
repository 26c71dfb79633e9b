"""Optimizers that put other weights into the model for an evaluation, as schedule-free ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from faces import under
from schedule_free import RATE, ScheduleFree
from torch import nn

from unipar.compat.accelerate import Accelerator
from unipar.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DATA = torch.randn(6, 2, 4, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def losses(model: Any, optimizer: Any, backward: Any, steps: range) -> list[float]:
    """Of each step, and of an evaluation after every other one."""
    found = []
    for step in steps:
        optimizer.train()
        loss = model(DATA[step]).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
        if step % 2:
            optimizer.eval()
            with torch.no_grad():
                found.append(model(DATA[0]).square().mean().item())
    return found


def by_hand() -> list[float]:
    model = net()
    return losses(model, ScheduleFree(model.parameters()), torch.Tensor.backward, range(6))


def trained(directory: str) -> tuple[list[float], list[float]]:
    """The losses of a run, and of its end once more, from its checkpoint."""
    accelerator, model = Accelerator(), net()
    model, optimizer = accelerator.prepare(model, ScheduleFree(model.parameters()))
    found = losses(model, optimizer, accelerator.backward, range(4))
    accelerator.save_state(directory)
    found += losses(model, optimizer, accelerator.backward, range(4, 6))
    accelerator.load_state(directory)
    return found, losses(model, optimizer, accelerator.backward, range(4, 6))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_modes_reach_the_weights(world_pool: Any, tmp_path: Path, strategy: str) -> None:
    for found, again in world_pool(2).run(under, strategy, trained, str(tmp_path)):
        assert found == pytest.approx(by_hand(), rel=1e-5)
        assert again == found[-len(again) :]


def refusal() -> str:
    model = net()
    with pytest.raises(ConfigError) as refused:
        Accelerator().prepare(model, ScheduleFree(model.parameters()))
    return str(refused.value)


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "ddp:shard_optimizer=true"])
def test_modes_that_would_not_reach_them_are_refused(world_pool: Any, strategy: str) -> None:
    for message in world_pool(2).run(under, strategy, refusal):
        assert "ScheduleFree has train() and eval(), which put other weights into" in message
        assert "Use strategy='fsdp', or one that keeps tensors whole (" in message


def plain_modes() -> float:
    accelerator, model = Accelerator(), net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    return losses(model, optimizer, accelerator.backward, range(2))[-1]


def test_an_optimizer_without_modes_takes_them_as_accelerates_does(world_pool: Any) -> None:
    """A script calls them whatever it was told to train with."""
    assert len(set(world_pool(2).run(under, "ddp", plain_modes))) == 1
