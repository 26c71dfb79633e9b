"""The exit code of a benchmark."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from unipar.benchmark.compare import Comparison, Kind
from unipar.benchmark.recommend import drifts, measured, name
from unipar.benchmark.result import BenchResult

SUCCESS, WORSE, CANNOT_TELL = 0, 1, 3
"""Exit codes: all is well; something failed, drifts or became worse; the noise hides it."""


def problems(result: BenchResult, strategies: Sequence[str], kinds: Collection[Kind]) -> list[str]:
    """List, in words, the problems of the strategies that were asked for.

    A strategy that is refused in one shape and measured in another, as ``single`` on two devices,
    has not failed.

    Args:
        result: what was found.
        strategies: those that were asked for, as cells name them.
        kinds: which kinds count. That nothing at all was measured always does.
    """
    cells = [one for one in result.cells if one.cell.strategy in strategies]
    ran = {one.cell.strategy for one in measured(cells)}
    if not ran:
        return ["nothing was measured"]
    found = []
    for one in cells:
        refused_only_here = one.status == "refused" and one.cell.strategy in ran
        if "failed" in kinds and one.status != "measured" and not refused_only_here:
            found.append(f"{name(one)}: {one.status}")
        if "drift" in kinds and drifts(one):
            found.append(f"{name(one)} drifts")
    return found


def of_comparison(found: Comparison, kinds: Collection[Kind]) -> int:
    """The exit code of two results beside each other."""
    if found.is_worse(kinds):
        return WORSE
    return CANNOT_TELL if "regression" in kinds and found.undecided else SUCCESS
