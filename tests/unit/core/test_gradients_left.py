"""Gradients that others have left before a step, and those that its loss function leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from unipar import ConfigError, Session
from unipar.data.batch import Batch, MicroBatch
from unipar.engine import StepEngine


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=1.0)


X = torch.ones(2, 2)
BATCH = Batch((MicroBatch(X, 2),), 2)


def mean(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()


def leaving(model: Any, x: torch.Tensor) -> torch.Tensor:
    model(x).sum().backward()
    return model(x).mean()


def test_what_others_have_left_is_no_part_of_a_step() -> None:
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    with Session("single", device="cpu") as session:
        engine = session.prepare(model, optimizer=sgd)
        model(X).sum().backward()
        engine.train_step(BATCH, mean)
        torch.testing.assert_close(before - model.weight.detach(), torch.ones(1, 2))
        assert model.weight.grad is None


@pytest.mark.parametrize("left", [False, True], ids=["fresh", "after others"])
@pytest.mark.parametrize("num", [1, 2])
def test_a_loss_function_leaves_no_gradient(num: int, left: bool) -> None:
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    with Session("single", device="cpu") as session:
        engine = session.prepare(model, optimizer=sgd)
        if left:
            model(X).sum().backward()
        batch = Batch((MicroBatch(X, 2),) * num, 2 * num)
        losses = iter([mean] * (num - 1) + [leaving])
        with pytest.raises(ConfigError, match="changed by something else"):
            engine.train_step(batch, lambda model, x: next(losses)(model, x))
        assert torch.equal(model.weight, before)
        engine.train_step(BATCH, mean)
        torch.testing.assert_close(before - model.weight.detach(), torch.ones(1, 2))


def test_what_another_engines_pass_adds_to_gradients_that_are_not_shown_is_refused() -> None:
    """Autograd would add in place to the stand-in of one, which has no memory."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    with Session("single", device="cpu") as session:
        made = session.prepare(first, optimizer=sgd, name="first")
        judging = session.prepare(second, optimizer=sgd, name="second")
        assert isinstance(made, StepEngine)
        made.lend_gradients()
        made.backward(made(X).mean(), num_items=2)
        judging.backward(judging(made(X)).mean(), num_items=2)
        with pytest.raises(ConfigError, match="let no backward pass of another model"):
            made.backward(made(X).mean(), num_items=2)
        judging.step()
