"""Functions that know parameters from before these are replaced: as by hand, or refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from plain import BATCH, Model, batches, build, loss_fn
from torch import nn, optim
from torch.distributed.tensor import DTensor

import unipar
from unipar.data.batch import Batch, MicroBatch
from unipar.errors import ConfigError
from unipar.testing.pool import WorldPools
from unipar.world import Placement

Weights = dict[str, torch.Tensor]
Choose = Callable[[Model], Callable[[Any], optim.Optimizer]]

OBJECTIVE = unipar.Objective(
    lambda batch: (batch[0],), lambda output, batch: nn.functional.cross_entropy(output, batch[1])
)
DIVIDING = ("fsdp", "mesh:pp=2")


def head_and_rest(is_head: Callable[[str, nn.Parameter], bool], named: Any) -> optim.Optimizer:
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in named:
        groups[is_head(name, parameter)].append(parameter)
    return optim.SGD([{"params": groups[True], "lr": 0.5}, {"params": groups[False]}], lr=0.05)


# -- as objects ------------------------------------------------------------------------------------


def by_id(model: Model) -> Any:
    ids = {id(p) for p in model.head.parameters()}
    return lambda named: head_and_rest(lambda _, p: id(p) in ids, named)


def by_set(model: Model) -> Any:
    own = set(model.head.parameters())
    return lambda named: head_and_rest(lambda _, p: p in own, named)


def beside_others(model: Model) -> Any:
    """No group is empty."""
    ids = {id(p) for p in model.head.parameters()}
    return lambda named: head_and_rest(lambda _, p: p.ndim == 1 or id(p) in ids, named)


def by_rate(model: Model) -> Any:
    """A group for each."""
    rates = {id(p): 0.5 for p in model.head.parameters()}
    return lambda named: optim.SGD(
        [{"params": [p], "lr": rates.get(id(p), 0.05)} for _, p in named], lr=0.1
    )


def left_out(model: Model) -> Any:
    ids = {id(p) for p in model.head.parameters()}
    return lambda named: optim.SGD([p for _, p in named if id(p) not in ids], lr=0.1)


def in_a_group(model: Model) -> Any:
    """Several optimizers, of which a function of name and parameter chooses."""
    ids = {id(p) for p in model.head.parameters()}
    head = {"params": lambda _, p: p.ndim == 1 or id(p) in ids, "name": "sgd", "lr": 0.5}
    return {"head": head, "rest": {"name": "sgd", "lr": 0.05}}


AS_OBJECTS = (by_id, by_set, beside_others, by_rate, left_out, in_a_group)


# -- otherwise -------------------------------------------------------------------------------------


def by_name(model: Model) -> Any:
    return lambda named: head_and_rest(lambda name, _: name.startswith("head."), named)


def by_shape(model: Model) -> Any:
    return lambda named: head_and_rest(lambda _, p: p.ndim == 1 and p.numel() == 3, named)


def by_note(model: Model) -> Any:
    for parameter in model.head.parameters():
        parameter.steps_far = True  # pyright: ignore
    return lambda named: head_and_rest(lambda _, p: hasattr(p, "steps_far"), named)


def freezing(model: Model) -> Any:
    def make(named: Any) -> optim.Optimizer:
        for name, parameter in (named := list(named)):
            parameter.requires_grad_("head" in name)
        return optim.SGD([p for _, p in named if p.requires_grad], lr=0.1)

    return make


def from_the_model(model: Model) -> Any:
    def make(named: Any) -> optim.Optimizer:
        rest = [p for n, p in model.named_parameters() if "head" not in n]
        return optim.SGD([{"params": model.head.parameters(), "lr": 0.5}, {"params": rest}], lr=0.1)

    return make


def with_notes(model: Model) -> Any:
    """Groups say what compares otherwise than numbers."""
    notes = {"scales": (torch.ones(3), [torch.zeros(2)]), "bound": float("nan")}
    return lambda named: optim.SGD([{"params": [p for _, p in named], **notes}], lr=0.1)


OTHERWISE = (by_name, by_shape, by_note, freezing, from_the_model, with_notes)


def by_hand(choose: Choose) -> Weights:
    model = build()
    optimizer = choose(model)(model.named_parameters())
    for batch in batches():
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def train(placement: Placement, strategy: str, choose: Choose) -> Weights:
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        model = build()
        engine = session.prepare(model, optimizer=choose(model))
        world = session.world
        share = BATCH // world.data_size
        own = slice(world.data_rank * share, (world.data_rank + 1) * share)
        for inputs, targets in batches():
            part = MicroBatch((inputs[own], targets[own]), share)
            engine.train_step(Batch((part,), BATCH), OBJECTIVE)
        return {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in engine.module.named_parameters()
        }


@pytest.mark.parametrize("strategy", DIVIDING)
@pytest.mark.parametrize("choose", AS_OBJECTS)
def test_a_choice_of_objects_that_are_replaced_is_refused(
    choose: Choose, strategy: str, world_pool: WorldPools
) -> None:
    said = r"(fsdp|mesh): the optimizer function chooses .*head\.weight.* Choose by name"
    with pytest.raises(ConfigError, match=said):
        world_pool(2).run(train, strategy, choose)


@pytest.mark.parametrize(
    ("strategy", "choose"),
    [
        *((strategy, choose) for strategy in DIVIDING for choose in OTHERWISE),
        # Where they stay the same objects.
        ("ddp", by_id),
    ],
)
def test_any_other_choice_trains_as_by_hand(
    strategy: str, choose: Choose, world_pool: WorldPools
) -> None:
    expected = by_hand(choose)
    for weights in world_pool(2).run(train, strategy, choose):
        assert weights
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


def groups(placement: Placement, strategy: Any) -> list[tuple[str, ...]]:
    """The names in the groups of what is saved."""
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        model = build()
        engine = session.prepare(model, optimizer=from_the_model(model))
        return [group.params for group in engine.export_state().groups]


def test_stages_save_the_groups_of_the_whole_model(world_pool: WorldPools) -> None:
    assert world_pool(2).run(groups, "mesh:pp=2") == world_pool(2).run(groups, "ddp")


def drawn(placement: Placement, strategy: str) -> list[Any]:
    """What an optimizer function draws, and the run after it."""
    found: list[Any] = []

    def make(named: Any) -> optim.Optimizer:
        found[:] = [random.random(), np.random.rand(), torch.rand(()).item()]
        return optim.SGD([p for _, p in named], lr=found[2])

    with unipar.Session(strategy, device="cpu", placement=placement, seed=5) as session:
        random.seed(5)
        np.random.seed(5)
        session.prepare(build(), optimizer=make)
        return [*found, random.random(), np.random.rand(), torch.rand(()).item()]


@pytest.mark.parametrize("strategy", DIVIDING)
def test_a_function_is_called_again_with_the_same_random_numbers(
    strategy: str, world_pool: WorldPools
) -> None:
    assert world_pool(2).run(drawn, strategy) == world_pool(2).run(drawn, "ddp")


def looking(placement: Placement, strategy: str) -> int:
    """How often a function is called that looks at values."""
    calls: list[float] = []

    def make(named: Any) -> optim.Optimizer:
        parameters = [p for _, p in named]
        # There are none on the meta device.
        calls.append(0.0 if isinstance(parameters[0], DTensor) else parameters[0].sum().item())
        return optim.SGD(parameters, lr=0.1)

    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        session.prepare(build, optimizer=make)
        return len(calls)


def test_a_choice_that_cannot_be_compared_is_refused(world_pool: WorldPools) -> None:
    with pytest.raises(ConfigError, match=r"optimizer function raised .* names, shapes and"):
        world_pool(2).run(looking, "fsdp")
    assert world_pool(2).run(looking, "ddp") == [1, 1]


def penalized(placement: Placement, strategy: str, early: bool) -> list[float]:
    """The losses of steps on a penalty over parameters that were listed before.

    Args:
        placement: of the rank.
        strategy: its name.
        early: whether it was computed before, too.
    """
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        model = build()
        listed = list(model.parameters())

        def penalty() -> Any:
            return sum(p.square().sum() for p in listed)

        before = [penalty() for _ in range(3)] if early else []

        def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
            return OBJECTIVE.loss(output, batch) + (before.pop() if early else penalty())

        engine = session.prepare(model, optimizer=by_name(model))
        objective = unipar.Objective(OBJECTIVE.inputs, loss)
        size = BATCH * session.world.data_size
        parts = [Batch((MicroBatch(one, BATCH),), size) for one in batches()[:3]]
        return [engine.train_step(one, objective).loss for one in parts]


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("strategy", DIVIDING)
def test_a_loss_of_parameters_that_were_replaced_is_refused(
    strategy: str, early: bool, world_pool: WorldPools
) -> None:
    says = "the loss (is a DTensor: it was computed from parameters|depends on 'blocks)"
    if early:
        says = "gradient came to parameter '.*' as it was before"
    with pytest.raises(ConfigError, match=says):
        world_pool(2).run(penalized, strategy, early)


def test_replicas_train_on_a_loss_of_parameters_that_were_listed(world_pool: WorldPools) -> None:
    assert len(world_pool(2).run(penalized, "ddp", False)[0]) == 3
