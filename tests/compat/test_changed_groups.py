"""Scripts that change what their optimizer's groups hold, or look at its state, in training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from plain_scripts import plainly
from torch import nn

from unipar.compat.native.calls import load_whole_state_dict, whole_state_dict
from unipar.compat.native.wrappers import DistributedDataParallel
from unipar.compat.run import current

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
APART = ("zero1", "zero2", "zero3", "ddp:shard_optimizer=true")
"""Strategies that step tensors of their own, or those of one rank."""
DATA = torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(0))
"""Of each step and rank four samples."""

Change = Callable[[Any, torch.optim.Optimizer, int], None]


def popped(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        optimizer.param_groups.pop(0)


def assigned(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step in (1, 3):
        optimizer.param_groups[1]["params"] = [*model.parameters()][2 if step == 3 else 3 :]


def in_turn(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        optimizer.param_groups.reverse()


def of_another(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 1:
        optimizer.param_groups[0]["params"] = list(nn.Linear(4, 4).parameters())


def emptied(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 2:
        optimizer.state.clear()


def begun_anew(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 2:
        optimizer.state = defaultdict(dict)


def looked_at(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    for one in model.parameters():
        optimizer.state[one]["exp_avg"].mul_(0.5)


def looked_for(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    assert all(one in optimizer.state for one in model.parameters())


def train(change: Change, *, wraps: bool = True) -> list[float]:
    """Losses of all samples, and weights at last."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    groups = [{"params": layers[0].parameters()}, {"params": layers[2].parameters(), "lr": 0.1}]
    optimizer = torch.optim.Adam(groups, lr=0.05)
    model = DistributedDataParallel(layers) if wraps else layers
    found = []
    for step, shares in enumerate(DATA):
        optimizer.zero_grad()
        x = shares[current.placement().rank] if wraps else shares.flatten(0, 1)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        if wraps:
            loss = loss.detach()
            torch.distributed.all_reduce(loss)
        found.append(loss.item() / (2 if wraps else 1))
        change(model, optimizer, step)
    state = whole_state_dict(layers) if wraps else layers.state_dict()
    return [*found, *(one.double().sum().item() for one in state.values())]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("change", [popped, assigned, in_turn, emptied, begun_anew, looked_for])
def test_what_pytorch_does_strategies_do_that_step_the_models_own_parameters(
    world_pool: Any, change: Change, strategy: str
) -> None:
    expected = train(change, wraps=False)
    for found in world_pool(2).run(plainly, strategy, partial(train, change)):
        assert found[0] == pytest.approx(expected, rel=1e-4, abs=1e-5), found


@pytest.mark.parametrize("strategy", APART)
@pytest.mark.parametrize("change", [popped, assigned, in_turn])
def test_others_refuse_groups_that_have_changed(
    world_pool: Any, change: Change, strategy: str
) -> None:
    for said in world_pool(2).run(plainly, strategy, partial(train, change)):
        assert "param_groups hold other parameters than when the model" in said
        assert f"the strategy '{strategy.partition(':')[0]}' knows what it divides" in said
        assert "such as ddp without shard_optimizer" in said


@pytest.mark.parametrize("strategy", APART)
@pytest.mark.parametrize("change", [emptied, begun_anew])
def test_state_is_cleared_where_it_is(world_pool: Any, change: Change, strategy: str) -> None:
    expected = train(change, wraps=False)
    for found in world_pool(2).run(plainly, strategy, partial(train, change)):
        assert found[0] == pytest.approx(expected, rel=1e-4, abs=1e-5), found


@pytest.mark.parametrize("strategy", APART)
@pytest.mark.parametrize("change", [looked_at, looked_for])
def test_state_of_a_parameter_is_refused_where_there_is_none(
    world_pool: Any, change: Change, strategy: str
) -> None:
    said = world_pool(2).run(plainly, strategy, partial(train, change))
    # A rank may hold all that comes before what another one has.
    assert all("divides it among ranks, in tensors of its own" in one for one in said), said


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_parameters_of_another_model_are_refused(world_pool: Any, strategy: str) -> None:
    for said in world_pool(2).run(plainly, strategy, partial(train, of_another)):
        assert "were given 2 parameters that the model did not have" in said


def kept_from_before() -> list[float]:
    """Parameters that the script has from before a strategy put others in their place."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    held = list(model.parameters())
    optimizer = torch.optim.SGD(held, lr=0.1)
    for x in DATA[:2, current.placement().rank]:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.param_groups[0]["params"] = held
    return [one.sum().item() for one in whole_state_dict(model).values()]


def test_parameters_from_before_stand_for_the_models(world_pool: Any) -> None:
    whole = world_pool(2).run(plainly, "ddp", kept_from_before)
    assert all(told == [] for _, told in whole)
    for found, expected in zip(
        world_pool(2).run(plainly, "fsdp", kept_from_before), whole, strict=True
    ):
        assert found[0] == pytest.approx(expected[0])


def numbered(change: Change) -> list[float]:
    """The numbers in a state dict, and what the state under each is of."""
    saved: dict[str, Any] = {}

    def save(model: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
        change(model, optimizer, step)
        if step == 3:
            saved.update(whole_state_dict(optimizer))
            load_whole_state_dict(optimizer, saved)

    train(save)
    groups = [number for group in saved["param_groups"] for number in group["params"]]
    state = saved["state"].items()
    return [*groups, *(x for number, one in state for x in (number, one["exp_avg"].numel()))]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_state_is_saved_by_the_numbers_that_groups_give(world_pool: Any, strategy: str) -> None:
    for found, _ in world_pool(2).run(plainly, strategy, partial(numbered, popped)):
        assert found == [0, 1, 0, 6, 1, 1]
