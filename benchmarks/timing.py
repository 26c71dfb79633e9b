"""Paired comparisons: what is compared runs in turns, and each ratio is of neighbors in time."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

BASELINE = "baseline"


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios, with the 95 % bootstrap interval of that median.

    Attributes:
        median: of the ratios.
        low: lower end of the interval.
        high: upper end of the interval.
        pairs: number of ratios.
    """

    median: float
    low: float
    high: float
    pairs: int

    @classmethod
    def of(cls, ours: Sequence[float], baseline: Sequence[float]) -> Ratio:
        ratios = [a / b for a, b in zip(ours, baseline, strict=True)]
        draw = random.Random(0)
        medians = sorted(
            statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000)
        )
        low, high = medians[49], medians[1949]
        return cls(statistics.median(ratios), low, high, len(ratios))


def in_turns(contenders: Mapping[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Run every contender once a turn, in a new order each turn.

    In a fixed order each would always run in the caches that the same one has left.

    Args:
        contenders: by name, a function that does its work and returns what it measured.
        turns: how often.
    """
    names = list(contenders)
    measured: dict[str, list[float]] = {name: [] for name in names}
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
