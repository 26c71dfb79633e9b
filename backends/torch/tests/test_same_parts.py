"""Ranks that use different parts of a model that is divided are told, and nothing is mixed up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import unipar
from unipar.errors import ConfigError
from unipar.strategy import Engine
from unipar.world import Placement

DATA = torch.linspace(-1, 1, 32).reshape(8, 4)


class Model(nn.Module):
    """Blocks and heads of one size each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(4, 1) for _ in range(2))

    def forward(self, x: torch.Tensor, skip: int, head: int = 0) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != skip:
                x = layer(x)
        return [one(x) for one in self.heads][head]


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def by_train_step(engine: Engine, passes: list[dict[str, int]], data: torch.Tensor) -> float:
    """One step of as many micro-batches as there are passes."""
    left = iter(passes)

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        return model(batch, **next(left)).square().mean()

    parts = tuple(unipar.MicroBatch(part, len(part)) for part in data.chunk(len(passes)))
    return engine.train_step(unipar.Batch(parts, len(DATA)), loss).loss


def by_hand(engine: Engine, passes: list[dict[str, int]], data: torch.Tensor) -> float:
    for part, given in zip(data.chunk(len(passes)), passes, strict=True):
        engine.backward(engine(part, **given).square().mean(), num_items=len(part))
    return engine.step().loss


Step = Callable[[Engine, list[dict[str, int]], torch.Tensor], float]
Plan = list[list[list[dict[str, int]]]]
"""What each rank gives the model, by step and pass."""


def trained(placement: Placement, strategy: str, step: Step, plan: Plan) -> tuple[Any, ...]:
    """Losses, what was refused, and the whole weights after each step that was not."""
    losses, said, weights = [], "", []
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(Model(), optimizer=sgd)
        for ranks in plan:
            data = DATA[placement.rank :: placement.size]
            try:
                losses.append(step(engine, ranks[placement.rank], data))
            except ConfigError as error:
                said = str(error)
            state = engine.module.state_dict().values()
            whole: list[Any] = [getattr(p, "full_tensor", p.clone)() for p in state]
            weights.append(torch.cat([p.flatten() for p in whole]))
    return losses, said, weights


WHOLE = {"skip": -1}
STEPS = pytest.mark.parametrize("step", [by_train_step, by_hand])


@STEPS
@pytest.mark.parametrize("sharding", ["full", "grad_op"])
def test_ranks_that_leave_out_different_blocks_are_told(
    world_pool: Any, step: Step, sharding: str
) -> None:
    plan = [[[WHOLE], [WHOLE]], [[{"skip": 1}], [{"skip": 2}]]]
    for losses, said, weights in world_pool(2).run(
        trained, f"fsdp:sharding={sharding}", step, plan
    ):
        assert len(losses) == 1
        assert "rank 0 has computed 'layers.2' 1 times, and rank 1 0 times" in said
        assert "Nothing was updated by this step" in said
        assert "ddp:find_unused_parameters=true" in said
        assert torch.equal(weights[0], weights[1])


@STEPS
def test_another_order_of_the_same_blocks_is_told(world_pool: Any, step: Step) -> None:
    one, other = {"skip": 0}, {"skip": 1}
    for losses, said, _ in world_pool(2).run(trained, "fsdp", step, [[[one, other], [other, one]]]):
        assert not losses
        assert "the order is another one. Nothing was updated" in said


@STEPS
def test_heads_that_ranks_use_in_turn_are_told(world_pool: Any, step: Step) -> None:
    first, second = {"skip": -1, "head": 0}, {"skip": -1, "head": 1}
    differ, alike = [[first], [second]], [[first], [first]]
    names = "of 'heads.0.weight', 'heads.0.bias', 'heads.1.weight', 'heads.1.bias' either rank 0"
    for losses, said, _ in world_pool(2).run(trained, "fsdp", step, [differ]):
        assert not losses
        assert names in said
        assert "Nothing was updated by this step" in said
    # Only the last backward pass of a later step is known one step late.
    for losses, said, _ in world_pool(2).run(trained, "fsdp", step, [alike, differ, alike]):
        assert len(losses) <= 2
        assert names in said


def saved(placement: Placement, plan: Plan) -> str:
    with unipar.Session("fsdp", device="cpu", placement=placement) as session:
        engine = session.prepare(Model(), optimizer=sgd)
        for ranks in plan:
            by_train_step(engine, ranks[placement.rank], DATA[placement.rank :: 2])
        try:
            engine.export_state()
        except ConfigError as error:
            return str(error)
    return ""


def test_what_a_last_step_has_mixed_up_is_not_saved(world_pool: Any) -> None:
    first, second = {"skip": -1, "head": 0}, {"skip": -1, "head": 1}
    alike = [[first], [first]]
    for said in world_pool(2).run(saved, [alike, [[first], [second]]]):
        assert "The last step was taken by what came of it" in said
    assert world_pool(2).run(saved, [alike, [[second], [second]]]) == ["", ""]


@STEPS
@pytest.mark.parametrize("strategy", ["fsdp", "ddp:find_unused_parameters=true"])
def test_blocks_that_all_ranks_leave_out_are_left_out(
    world_pool: Any, strategy: str, step: Step
) -> None:
    plan = [[[{"skip": skip}] * 2] * 2 for skip in (-1, 0, 2, 1)]
    losses, _, weights = world_pool(1).run(trained, "single", step, plan)[0]
    for found, said, whole in world_pool(2).run(trained, strategy, step, plan):
        assert not said
        torch.testing.assert_close((found, whole), (losses, weights))


@STEPS
def test_replicas_may_leave_out_different_ones(world_pool: Any, step: Step) -> None:
    plan = [[[{"skip": 0}], [{"skip": 2}]], [[{"skip": -1}], [{"skip": 1}]]]
    for losses, said, _ in world_pool(2).run(
        trained, "ddp:find_unused_parameters=true", step, plan
    ):
        assert len(losses) == 2
        assert not said
