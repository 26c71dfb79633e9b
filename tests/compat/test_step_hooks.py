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


def late() -> list[float]:
    hvd.init()
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD([*net[0].parameters(), *net[1].parameters()], lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    for step in range(4):
        if step == 1:
            net[0].requires_grad_(True)
        if step == 2:
            optimizer.zero_grad()
            net[2].zero_grad()
            optimizer.add_param_group({"params": list(net[2].parameters())})
        optimizer.zero_grad()
        net(torch.ones(2, 4)).mean().backward()
        optimizer.step()
    return []


def test_what_horovod_would_leave_to_each_rank_is_told_once(world_pool: Any) -> None:
    (_, told), _ = world_pool(2).run(plainly, "ddp", late)
    assert [line.split(",")[0] for line in told] == [
        "0.bias", "add_param_group came after hvd.DistributedOptimizer"
    ]  # fmt: skip
    assert "Horovod leaves the gradients of these to each rank" in told[0]


def hooked(by_class: bool) -> list[float]:
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

    def halved(*args: Any, **kwargs: Any) -> torch.optim.SGD:
        optimizer = plain(*args, **kwargs)
        optimizer.register_step_pre_hook(halve)
        return optimizer

    plain = torch.optim.SGD
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.optim, "SGD", Halving if by_class else halved)
        return train(model, mean_of_square, batches(4, 4, 4))


@pytest.mark.parametrize("by_class", [False, True])
def test_a_hook_of_the_script_is_a_part_of_the_step(world_pool: Any, by_class: bool) -> None:
    check(world_pool(2).run(plainly, SHARDED, hooked, by_class), lambda: hooked(by_class))
