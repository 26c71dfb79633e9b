"""Two results beside each other: what became slower, fuller or wrong, beyond the noise."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel
from rich.console import RenderableType

from unipar.benchmark.cells import Cell
from unipar.benchmark.report import comparison as comparison_report
from unipar.benchmark.report import text
from unipar.benchmark.result import BenchResult, CellResult, Job, Machine
from unipar.benchmark.summary import step_time
from unipar.errors import ConfigError

LEAST = 0.03
"""Changes below this are none: two runs of one program differ by more than their repeats show."""

_DRAWS = 2000

Verdict = Literal["more", "less", "same", "unknown"]


class Ratio(BaseModel, frozen=True):
    """The median of the later repeats over that of the earlier ones, with its 95 % interval.

    Attributes:
        median: of the later repeats, over that of the earlier ones.
        low: lower end of the interval.
        high: upper end of the interval.
        repeats: of the benchmark that has fewer; with one there is no interval.
    """

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, after: Sequence[float], before: Sequence[float]) -> Ratio:
        """By the bootstrap (Efron, 1979), unpaired: the two have no round in common.

        Raises:
            ValueError: one of them is empty.
        """
        if not after or not before:
            raise ValueError("a ratio needs a value on both sides")
        draw = random.Random(0)

        def median(values: Sequence[float]) -> float:
            return statistics.median(draw.choices(values, k=len(values)))

        drawn = statistics.quantiles((median(after) / median(before) for _ in range(_DRAWS)), n=40)
        return cls(
            median=statistics.median(after) / statistics.median(before),
            low=drawn[0],
            high=drawn[-1],
            repeats=min(len(after), len(before)),
        )

    def verdict(self, least: float) -> Verdict:
        """Whether it is above or below 1 by ``least``, and beyond the noise."""
        if self.repeats < 2:
            return "unknown"
        if self.low > 1 and self.median >= 1 + least:
            return "more"
        if self.high < 1 and self.median <= 1 - least:
            return "less"
        return "same"


class Change(BaseModel, frozen=True):
    """One cell, before and after.

    Attributes:
        cell: its shape.
        before: what was found.
        after: what was found later.
        time: ratio of step times; ``None`` where one has none.
        time_verdict: whether steps take more time, or less.
        memory: ratio of the peaks of the fullest rank; ``None`` where one has none.
        memory_verdict: whether more memory is held, or less.
        regressions: what became worse, in words.
    """

    cell: Cell
    before: CellResult
    after: CellResult
    time: Ratio | None
    time_verdict: Verdict
    memory: Ratio | None
    memory_verdict: Verdict
    regressions: list[str]


class Comparison(BaseModel, frozen=True):
    """Two results of one job.

    Attributes:
        changes: cells that both have, in the order of the later one.
        only_before: names of cells that the earlier one alone has.
        only_after: names of cells that the later one alone has.
        warnings: why the two may not be comparable: another machine, other versions.
        least: the smallest relative change that counts.
    """

    changes: list[Change]
    only_before: list[str]
    only_after: list[str]
    warnings: list[str]
    least: float

    @property
    def regressions(self) -> list[str]:
        """What became worse, in words; loops written by hand are not unipar's doing."""
        return [
            f"{name(change.cell)}: {one}"
            for change in self.changes
            if not change.cell.raw
            for one in change.regressions
        ]


def compare(before: BenchResult, after: BenchResult, least: float = LEAST) -> Comparison:
    """Set cells of equal shape beside each other.

    Args:
        before: the earlier result.
        after: the later one.
        least: the smallest relative change of time or memory that counts, even beyond the noise.

    Raises:
        ConfigError: they are of different jobs, or have no cell in common.
    """
    if apart := _different_jobs(before.job, after.job):
        raise ConfigError(
            f"these are two different jobs, whose times say nothing of each other: "
            f"{'; '.join(apart)}. Compare results of the same run file."
        )
    earlier = {one.cell: one for one in before.cells}
    later = {one.cell: one for one in after.cells}
    both = [cell for cell in later if cell in earlier]
    if not both:
        raise ConfigError(
            "these results have no cell in common: before there were "
            f"{_names(earlier)}, and after {_names(later)}."
        )
    return Comparison(
        changes=[_change(earlier[cell], later[cell], least) for cell in both],
        only_before=[name(cell) for cell in earlier if cell not in later],
        only_after=[name(cell) for cell in later if cell not in earlier],
        warnings=_warnings(before, after),
        least=least,
    )


def render(
    found: Comparison, format: Literal["table", "markdown", "csv"] = "table"
) -> RenderableType:
    """What rich prints; Markdown and CSV are text."""
    return comparison_report.FORMATS[format](found)


def name(cell: Cell) -> str:
    """``ddp on 4 devices``."""
    return f"{cell.label} on {text.devices(cell.devices)}"


def _change(before: CellResult, after: CellResult, least: float) -> Change:
    time = _ratio(_step_times(after), _step_times(before))
    memory = _ratio(_peaks(after), _peaks(before))
    time_verdict = time.verdict(least) if time else "unknown"
    memory_verdict = memory.verdict(least) if memory else "unknown"
    worse = []
    if before.status == "measured" and after.status != "measured":
        worse.append(f"it was measured before, and now: {after.status}. {after.reason}".strip())
    if time and time_verdict == "more":
        worse.append(
            f"a step takes {time.median:.3f} times as long (95 % interval {time.low:.3f} to "
            f"{time.high:.3f})"
        )
    if memory and memory_verdict == "more":
        worse.append(
            f"the fullest rank holds {text.size(max(_peaks(after)))}, {memory.median:.3f} times as "
            "much"
        )
    if after.parity and after.parity.drifts and not (before.parity and before.parity.drifts):
        worse.append(
            f"its loss drifts by {text.difference(after.parity.difference)} from "
            f"{after.parity.reference}"
        )
    return Change(
        cell=after.cell,
        before=before,
        after=after,
        time=time,
        time_verdict=time_verdict,
        memory=memory,
        memory_verdict=memory_verdict,
        regressions=worse,
    )


def _ratio(after: Sequence[float], before: Sequence[float]) -> Ratio | None:
    return Ratio.of(after, before) if after and before and min(before) > 0 else None


def _step_times(result: CellResult) -> list[float]:
    return [step_time(trial) for trial in result.trials]


def _peaks(result: CellResult) -> list[float]:
    """Of the fullest rank of each repeat, in bytes."""
    held = [[rank.memory.peak for rank in trial.ranks if rank.memory] for trial in result.trials]
    return [float(max(peaks)) for peaks in held if peaks]


def _different_jobs(before: Job, after: Job) -> list[str]:
    apart = []
    if before.model != after.model:
        apart.append(f"model {before.model} and {after.model}")
    for what in ("parameters", "global_batch_size", "items"):
        first, second = getattr(before, what), getattr(after, what)
        # A benchmark of which nothing ran does not know them.
        if first and second and not math.isclose(first, second, rel_tol=1e-3):
            apart.append(f"{what} {first:,.10g} and {second:,.10g}")
    return apart


def _warnings(before: BenchResult, after: BenchResult) -> list[str]:
    found = [
        f"another machine: {what} '{first}' before, '{second}' after"
        for what, first, second in _machines(before.machine, after.machine)
        if first != second
    ]
    versions, others = before.machine.versions, after.machine.versions
    found += [
        f"{package} {versions.get(package, 'absent')} before, {others.get(package, 'absent')} after"
        for package in dict.fromkeys([*versions, *others])
        if versions.get(package) != others.get(package)
    ]
    if before.job.seed != after.job.seed:
        found.append(f"seed {before.job.seed} before, {after.job.seed} after")
    if min(before.job.repeats, after.job.repeats) < 2:
        found.append("one of them has one repeat, which shows no noise: nothing can be marked")
    return found


def _machines(before: Machine, after: Machine) -> list[tuple[str, str, str]]:
    return [
        ("processor", before.processor, after.processor),
        ("cores", str(before.cores), str(after.cores)),
        ("accelerators", ", ".join(before.accelerators), ", ".join(after.accelerators)),
        ("system", before.system, after.system),
    ]


def _names(cells: dict[Cell, CellResult]) -> str:
    return text.join(map(name, cells)) if cells else "none"
