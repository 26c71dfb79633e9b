"""What strategies cannot do as DDP and FSDP do is refused on ranks that have data of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from plain_scripts import plainly
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from unipar.compat.native.calls import clip_grad_norm_
from unipar.compat.native.fsdp import fully_shard
from unipar.compat.native.wrappers import DistributedDataParallel as DDP
from unipar.compat.run import current

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def stepped(model: Any, optimizer: torch.optim.Optimizer, *, careful: bool = False) -> None:
    model(torch.ones(3, 4)).square().mean().backward()
    if careful:
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    optimizer.zero_grad()


def grown() -> list[float]:
    """An optimizer is given the parameters of a second model."""
    model = DDP(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stepped(model, optimizer)
    optimizer.add_param_group({"params": DDP(nn.Linear(4, 1)).parameters()})
    return []


def ignoring(*names: str, unlike: bool = False, **options: Any) -> list[float]:
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[0].weight.requires_grad_(False).fill_(current.placement().rank if unlike else 0.5)
    DDP._set_params_and_buffers_to_ignore_for_model(model, names)
    stepped(DDP(model, **options), torch.optim.SGD(model.parameters(), lr=0.1))
    return []


def unlike(first: Any, second: Any) -> list[float]:
    """Policies of a layer, of another one, and of what computes with nothing of its own."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    for layer, half in ((model[0], first), (model[2], second)):
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=half))
    fully_shard(model)
    stepped(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return []


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first: nn.Module = nn.Linear(4, 3)
        self.second: nn.Module = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def by_two(wraps: str = "") -> list[float]:
    """Two optimizers, of a model that is wrapped, or of its parts that are."""
    model = Parts()
    optimizers = [
        torch.optim.SGD(model.first.parameters(), lr=0.1),
        torch.optim.Adam(model.second.parameters(), lr=0.1),
    ]
    called: nn.Module = model
    if wraps == "whole":
        called = DDP(model)
    elif wraps == "parts":
        model.first, model.second = DDP(model.first), DDP(model.second)
    for step in range(3):
        for one in optimizers:
            one.zero_grad()
        x = torch.arange(24.0).reshape(2, 3, 4) / 10 + step
        x = x[current.placement().rank] if wraps else x.flatten(0, 1)
        called(x).square().mean().backward()
        for one in optimizers:
            one.step()
    return [one.sum().item() for one in model.parameters()]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_of_what_is_wrapped_two_optimizers_are_refused(world_pool: Any, strategy: str) -> None:
    for said in world_pool(2).run(plainly, strategy, partial(by_two, "whole")):
        assert "a Parts is wrapped, and several optimizers update it (SGD and Adam)" in said
        assert "not wrapped" not in said


def around() -> list[float]:
    model = Parts()
    DDP(model)
    stepped(model.first, torch.optim.SGD(model.first.parameters(), lr=0.1))
    return []


def test_a_part_that_is_called_around_what_wraps_it_is_refused(world_pool: Any) -> None:
    for said in world_pool(2).run(plainly, "ddp", around):
        assert "this Linear is a part of a Parts that is wrapped, and is called around" in said


def test_parts_that_are_wrapped_for_themselves_have_one_each(world_pool: Any) -> None:
    expected = by_two()
    for found in world_pool(2).run(plainly, "ddp", partial(by_two, "parts")):
        assert found == (pytest.approx(expected, rel=1e-5), [])


def careful() -> list[float]:
    model = fully_shard(nn.Linear(4, 4))
    stepped(model, torch.optim.SGD(model.parameters(), lr=0.1), careful=True)
    return []


@pytest.mark.parametrize(
    ("act", "strategy", "said"),
    [
        (grown, "ddp", "was given 2 parameters that are not of the model that the optimizer"),
        (partial(ignoring, "0.bias", "0.weight"), "ddp", "_to_ignore names (0.bias)"),
        (partial(ignoring, "0.weight", unlike=True), "ddp", "_to_ignore names (0.weight)"),
        (partial(ignoring, "1.running_mean"), "ddp", "_to_ignore names (1.running_mean)"),
        (partial(unlike, torch.bfloat16, None), "fsdp", "policies have Linear compute in torch.bf"),
        (careful, "fsdp", "clip_grad_norm_(max_norm=1.0, norm_type=2.0, error_if_nonfinite=True)"),
    ],
)
def test_what_no_strategy_does(
    world_pool: Any, act: Callable[[], list[float]], strategy: str, said: str
) -> None:
    for one in world_pool(2).run(plainly, strategy, act):
        assert said in one


def test_what_ddp_is_to_leave_alone_may_be_what_strategies_do(world_pool: Any) -> None:
    names = "0.weight", "1.running_mean", "1.running_var", "1.num_batches_tracked"
    act = partial(ignoring, *names, broadcast_buffers=False)
    for one in world_pool(2).run(plainly, "ddp", act):
        assert one == ([], [])


def test_policies_that_are_alike_are_the_runs_precision(world_pool: Any) -> None:
    half = torch.bfloat16
    for one in world_pool(2).run(plainly, "fsdp", partial(unlike, half, half)):
        assert one == ([], [])
