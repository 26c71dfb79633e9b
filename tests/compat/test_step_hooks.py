"""Hooks of a script's optimizer run in its steps where ranks divide its state, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_scripts import batches, check, plainly, train
from torch import nn

from unipar.compat.horovod import torch as hvd

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SHARDED = "ddp:shard_optimizer=true"


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        return (self.first if first else self.second)(x)


def horovod() -> list[float]:
    """A head that a step leaves out is decayed, and moved, by a gradient of zero."""
    hvd.init()
    torch.manual_seed(0)
    net = Heads()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, weight_decay=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    for first in (True, False, True):
        optimizer.zero_grad()
        net(torch.ones(2, 4) + hvd.rank(), first).mean().backward()
        optimizer.step()
    return [one.sum().item() for one in net.parameters()]


def test_zeros_of_unused_parameters_are_there_under_any_strategy(world_pool: Any) -> None:
    (whole, _), _ = world_pool(2).run(plainly, "ddp", horovod)
    for found, _ in world_pool(2).run(plainly, SHARDED, horovod):
        assert found == pytest.approx(whole)


def hooked() -> list[float]:
    torch.manual_seed(1)
    model = nn.Linear(6, 1)

    def mean_of_square(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    def halve(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad.mul_(0.5)

    class Halving(torch.optim.SGD):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.register_step_pre_hook(halve)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.optim, "SGD", Halving)
        return train(model, mean_of_square, batches(4, 4, 4))


def test_a_hook_of_the_script_is_a_part_of_the_step(world_pool: Any) -> None:
    check(world_pool(2).run(plainly, SHARDED, hooked), hooked)
