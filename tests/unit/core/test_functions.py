"""What a user's functions return is looked at, before a step goes wrong with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from unipar import Session
from unipar.errors import ConfigError

OTHER = nn.Linear(3, 5)

OPTIMIZERS: list[tuple[Any, str]] = [
    (lambda named: None, r"optimizer function returned None \(is a `return` missing\?\).*AdamW"),
    (lambda named: [optim.SGD], r"optimizer function returned a list, and it must build"),
    (lambda named: optim.SGD([]), r"no parameter. It was called with 2 pairs .* 2 of them"),
    (lambda named: optim.SGD([{"params": []}]), r"no parameter. It was called with 2 pairs"),
    (lambda named: optim.SGD(OTHER.parameters()), r"SGD a tensor of shape \(5, 3\) that is none"),
    (lambda named: optim.LBFGS([p for _, p in named]), r"LBFGS .* its step\(\) needs a closure"),
    (3, r"optimizer is a int. Pass a function optimizer\(named_parameters\)"),
    ("admw", r"there is no optimizer 'admw'\. Did you mean 'adamw'\?"),
    (lambda: None, r"is called as optimizer\(named_parameters\): too many positional arguments"),
    (optim.SGD(OTHER.parameters()), r"a SGD that is built already.*Pass a function: optimizer=la"),
]


def sgd(named: Any) -> optim.Optimizer:
    return optim.SGD([p for _, p in named], lr=0.1)


@pytest.fixture
def session() -> Any:
    with Session("single", device="cpu") as session:
        yield session


@pytest.mark.parametrize(("build", "says"), OPTIMIZERS, ids=[says[:20] for _, says in OPTIMIZERS])
def test_an_optimizer_that_no_step_could_be_taken_with_is_refused(
    session: Session, build: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){says}"):
        session.prepare(nn.Linear(4, 2), optimizer=build)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda optimizer: None, r"lr_scheduler function returned None"),
        (lambda optimizer: optimizer, r"lr_scheduler function returned a SGD.*LRScheduler"),
        (
            optim.lr_scheduler.StepLR,
            r"the class StepLR .* missing a required argument: 'step_size'",
        ),
    ],
)
def test_a_scheduler_that_is_none_is_refused(
    session: Session, build: Callable[..., Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        session.prepare(nn.Linear(4, 2), optimizer=sgd, lr_scheduler=build)


def test_a_function_may_go_through_the_parameters_once_for_each_group(session: Session) -> None:
    def two_groups(named: Any) -> optim.Optimizer:
        weights = [p for name, p in named if name == "weight"]
        return optim.SGD([{"params": weights}, {"params": [p for n, p in named if n == "bias"]}])

    engine = session.prepare(nn.Linear(4, 2), optimizer=two_groups)
    assert engine.optimizer is not None
    assert [len(group["params"]) for group in engine.optimizer.param_groups] == [1, 1]


def test_an_error_of_the_functions_own_stays_as_it_is(session: Session) -> None:
    def fails(named: Any) -> optim.Optimizer:
        raise ValueError("of my own")

    with pytest.raises(ValueError, match="of my own"):
        session.prepare(nn.Linear(4, 2), optimizer=fails)


def test_sparse_gradients_are_not_clipped(session: Session) -> None:
    with pytest.raises(ConfigError, match=r"max_grad_norm=1 was given, and parameter 'weight'"):
        session.prepare(nn.Embedding(4, 2, sparse=True), optimizer=sgd, max_grad_norm=1.0)


@pytest.mark.parametrize("first", ["d", "g"])
def test_a_step_within_a_step_of_shared_parameters_is_refused(session: Session, first: str) -> None:
    trunk = nn.Linear(2, 2)
    engines = {
        name: session.prepare(nn.Sequential(trunk, nn.Linear(2, 1)), optimizer=sgd, name=name)
        for name in ("d", "g")
    }
    one, other = engines.pop(first), next(iter(engines.values()))
    one.backward(one(torch.ones(3, 2)).mean(), num_items=3)
    with pytest.raises(ConfigError, match=rf"engine '{first}' has gradients that it has not"):
        other.backward(other(torch.ones(3, 2)).mean(), num_items=3)
    one.step()
    other.backward(other(torch.ones(3, 2)).mean(), num_items=3)
    other.step()
