"""What a script's own functions find in a backward pass is what they find natively."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from faces import by_accelerate, by_deepspeed, by_fabric, under
from torch import nn

from unipar.compat.run import current

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DATA = torch.randn(4, 2, 3, 4, generator=torch.Generator().manual_seed(0))
"""Of each step and rank three samples."""


class Clamped(torch.autograd.Function):
    """As a quantizer's, or that of a recurrent net: not linear in the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].clamp(-0.02, 0.02)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inward, self.outward = nn.Linear(4, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outward(Clamped.apply(self.inward(x)))


def by_hand() -> list[list[float]]:
    """Two replicas' mean; nothing of unipar in it."""
    model, losses = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for shares in DATA:
        optimizer.zero_grad()
        own = [model(share).square().mean() for share in shares]
        for loss in own:
            loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= len(own)
        optimizer.step()
        losses.append([loss.item() for loss in own])
    return losses


def train(face: Callable[..., Any], strategy: str) -> list[float]:
    model, step = face(Net(), strategy)
    losses = []
    for shares in DATA:
        loss = model(shares[current.placement().rank]).square().mean()
        losses.append(loss.item())
        step(loss)
    return losses


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("face", [by_accelerate, by_fabric, by_deepspeed])
def test_a_backward_pass_that_is_not_linear_is_the_scripts_own(
    world_pool: Any, face: Callable[..., Any], strategy: str
) -> None:
    found = world_pool(2).run(under, strategy, train, face, strategy)
    torch.testing.assert_close(torch.tensor(found).T, torch.tensor(by_hand()))
