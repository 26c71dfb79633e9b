"""A backend sees an optimizer's name and arguments, whatever is put around what builds it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn, optim

from unipar import Session
from unipar.engine import Flat, with_divisible_optimizer
from unipar.optimizers.named import NamedOptimizer
from unipar.strategy import EngineSpec
from unipar.world import Placement, World

ADAMW = {"name": "adamw", "lr": 0.1}


def asked(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> EngineSpec:
    """The request that a strategy gets from a session."""
    seen: list[EngineSpec] = []
    with Session("single", device="cpu") as session:
        real = session.strategy.prepare

        def prepare(spec: EngineSpec, world: World) -> Any:
            seen.append(spec)
            return real(spec, world)

        monkeypatch.setattr(session.strategy, "prepare", prepare)
        session.prepare(nn.Linear(2, 2), optimizer=optimizer)
    return seen[0]


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("sgd", NamedOptimizer("sgd")),
        (ADAMW, NamedOptimizer("adamw", {"lr": 0.1})),
        (NamedOptimizer("adamw", {"lr": 0.1}), NamedOptimizer("adamw", {"lr": 0.1})),
        (lambda named: optim.SGD([p for _, p in named]), None),
        ({"matrices": {**ADAMW, "params": "weight"}, "rest": {}}, None),
    ],
)
def test_name_and_arguments_reach_a_strategy(
    optimizer: Any, expected: NamedOptimizer | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = asked(optimizer, monkeypatch)
    assert spec.named_optimizer == expected
    divided = with_divisible_optimizer(spec, "mine", World(Placement()), Flat())
    assert divided.optimizer is not spec.optimizer
    assert divided.named_optimizer == expected


def test_a_model_that_is_only_evaluated_has_none() -> None:
    assert EngineSpec(nn.Linear(2, 2)).named_optimizer is None
