"""Columns of integers as runs of equal steps: what follows a rule takes three numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Column: TypeAlias = NDArray[np.int64]
Runs: TypeAlias = tuple[int, ...]
"""Three numbers for each run: its first value, the step to the next one, and how many there are."""

_LIMIT = 2**63


def runs_of(column: Column) -> Runs:
    """The runs of a column; the longest from the start, then from where that ends."""
    num = len(column)
    steps = np.diff(column)
    ends = (np.flatnonzero(steps[1:] != steps[:-1]) + 1).tolist() if num > 2 else []
    found: list[int] = []
    at = 0
    for end in (*ends, num - 1):
        # A run ends with the value that the next step leaves, unless that began it.
        if end > at:
            found += (int(column[at]), int(steps[at]), end - at + 1)
            at = end + 1
    if at < num:
        found += (int(column[at]), 0, 1)
    return tuple(found)


def length(runs: Runs) -> int:
    """How many values there are."""
    return sum(runs[2::3])


def values(runs: Runs) -> Column:
    """The column, which :func:`fault` has found nothing wrong with."""
    if len(runs) == 3:
        first, step, count = runs
        return first + step * np.arange(count)
    table = np.array(runs, np.int64).reshape(-1, 3)
    counts = table[:, 2]
    begins = np.repeat(np.cumsum(counts) - counts, counts)
    within = np.arange(len(begins)) - begins
    return np.repeat(table[:, 0], counts) + np.repeat(table[:, 1], counts) * within


def value_at(runs: Runs, index: int) -> int:
    """One value of the column."""
    if len(runs) > 48:
        return int(values(runs)[index])
    for first, step, count in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        if index < count:
            return first + step * index
        index -= count
    raise IndexError(index)


def moved(runs: Runs, by: int) -> Runs:
    """The same column with ``by`` added to each value."""
    return tuple(number + by * (place % 3 == 0) for place, number in enumerate(runs))


def fault(runs: Sequence[int], num: int) -> str | None:
    """Say why these are no runs of ``num`` values from 0 to 2**63 - 1, as a stranger wrote them."""
    if len(runs) % 3:
        return f"{len(runs)} numbers are no runs of three"
    for first, step, count in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
        if count < 1 or (count == 1 and step):
            return f"{[first, step, count]} is no run"
        # Before any is multiplied out: a run says in three numbers what may take any room.
        if count > num or not (0 <= first < _LIMIT and 0 <= first + step * (count - 1) < _LIMIT):
            return f"{[first, step, count]} leads out of what there is"
    if length(tuple(runs)) != num:
        return f"it has {length(tuple(runs))} values, and there are {num} parts"
    return None
