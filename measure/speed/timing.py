"""Paired comparisons: what is compared runs in turns, and each ratio is of neighbors in time."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import TypeVar

BASELINE = "baseline"

Measured = TypeVar("Measured")


def in_turns(
    contenders: Mapping[str, Callable[[], Measured]], turns: int
) -> dict[str, list[Measured]]:
    """Run every contender once a turn, in a new order each turn.

    In a fixed order each would always run in the caches that the same one has left.

    Args:
        contenders: by name, a function that does its work and returns what it measured.
        turns: how often.
    """
    names = list(contenders)
    measured: dict[str, list[Measured]] = {name: [] for name in names}
    order = random.Random(0)
    for _ in range(turns):
        for name in order.sample(names, len(names)):
            measured[name].append(contenders[name]())
    return measured


def block(
    step: Callable[[], object], steps: int, clock: Callable[[], float] = perf_counter
) -> Callable[[], float]:
    """A function that takes ``steps`` steps and returns the seconds of one."""

    def run() -> float:
        began = clock()
        for _ in range(steps):
            step()
        return (clock() - began) / steps

    return run
