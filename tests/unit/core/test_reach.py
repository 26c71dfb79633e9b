"""What a function can reach is put back as it was, or known not to be."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from unipar.engine.reach import Reach

CALLS: list[int] = []
NUMBER = 0
SEEN = torch.zeros(2)
MOVING = itertools.count()


class Holder:
    def __init__(self) -> None:
        self.number, self.list, self.counter = 0, [0], Counter("a")
        self.within = {"tensor": torch.zeros(2), "deque": deque([1])}

    def __call__(self) -> None:
        self.number += 1
        self.list.append(1)
        self.counter.update("ab")
        self.within["tensor"] += 1
        self.within["deque"].append(2)
        self.new = True

    def state(self) -> Any:
        own = (self.number, list(self.list), dict(self.counter), list(self.within["deque"]))
        return (*own, self.within["tensor"].tolist(), hasattr(self, "new"))


def changes_globals() -> None:
    global NUMBER
    NUMBER += 1
    CALLS.append(NUMBER)
    SEEN.add_(1)


def through_another() -> None:
    changes_globals()


@pytest.mark.parametrize("function", [changes_globals, through_another])
def test_globals_are_put_back(function: Callable[[], None]) -> None:
    reach = Reach(None, function)
    assert reach.repeatable
    with reach.watching():
        function()
    assert CALLS == [1]
    assert NUMBER == 1
    reach.put_back()
    assert not CALLS
    assert NUMBER == 0
    assert SEEN.tolist() == [0, 0]


@pytest.mark.parametrize("bind", [lambda one: one, lambda one: one.__call__, functools.partial])
def test_objects_are_put_back(bind: Callable[[Holder], Any]) -> None:
    holder = Holder()
    before = holder.state()
    reach = Reach(None, bind(holder))
    with reach.watching():
        holder()
    assert holder.state() != before
    reach.put_back()
    assert holder.state() == before


def test_variables_of_a_closure_are_put_back() -> None:
    number, holder = 0, Holder()

    def change() -> None:
        nonlocal number
        number += 1
        holder()

    reach = Reach(None, change)
    change()
    assert number == 1
    reach.put_back()
    assert number == 0
    assert holder.number == 0


def test_what_hooks_of_a_module_fill_and_weights_moved_by_data_are_put_back() -> None:
    shapes: list[Any] = []
    first = nn.Linear(2, 2)
    model = nn.Sequential(first, nn.BatchNorm1d(2))
    first.register_forward_hook(lambda *_: shapes.append(1))
    before = [one.clone() for one in (*model.parameters(), *model.buffers())]
    reach = Reach(model)
    with reach.watching():
        model(torch.randn(4, 2))
        first.weight.data.mul_(2)
        with torch.no_grad():
            first.bias.view(-1)[:1] += 1
    assert shapes == [1]
    reach.put_back()
    assert not shapes
    after = [*model.parameters(), *model.buffers()]
    assert all(map(torch.equal, before, after))


class Recording(nn.Module):
    """What its forward reaches is of a function around it, and of another method."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.note(x)
        return x

    @staticmethod
    def note(x: torch.Tensor) -> None:
        CALLS.append(len(x))


def test_what_methods_reach_is_put_back() -> None:
    model = nn.Sequential(Recording())
    reach = Reach(model)
    with reach.watching():
        model(torch.zeros(3))
    assert CALLS == [3]
    reach.put_back()
    assert not CALLS


def giving(value: Any) -> Callable[[], Any]:
    return lambda: value


def counting() -> int:
    return next(MOVING)


def talking() -> None:
    torch.distributed.barrier()


@pytest.mark.parametrize(
    "function",
    [
        giving(iter([1])),
        giving(random.Random(0)),
        giving([torch.Generator()]),
        counting,
        talking,
    ],
)
def test_what_cannot_be_put_back_is_known(function: Callable[[], Any]) -> None:
    assert not Reach(None, function).repeatable
