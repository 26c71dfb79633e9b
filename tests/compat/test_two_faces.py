"""What one face was given is no other's to find, where a program has two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from faces import Step, by_accelerate, by_deepspeed, under
from plain_scripts import plainly
from torch import nn

from unipar.compat.adopting import adoption

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def train(prepare: Callable[[nn.Module], tuple[Any, Step]]) -> list[float]:
    torch.manual_seed(0)
    model, step = prepare(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    torch.manual_seed(torch.distributed.get_rank())
    found = []
    for _ in range(3):
        loss = model(torch.randn(2, 3)).square().mean()
        step(loss)
        found.append(loss.item())
    assert not adoption.trained
    return found


@pytest.mark.parametrize("prepare", [by_accelerate, by_deepspeed])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_face_beside_that_of_torch_trains_as_alone(
    world_pool: Any, prepare: Any, strategy: str
) -> None:
    expected = world_pool(2).run(under, strategy, train, prepare)
    found = world_pool(2).run(plainly, strategy, train, prepare)
    for one, other in zip(found, expected, strict=True):
        assert isinstance(one, tuple), one
        assert one == (other, [])
