"""Two results beside each other: what became slower, fuller or wrong, beyond the noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from pydantic import BaseModel

from unipar.benchmark.cells import Cell
from unipar.benchmark.load import BUSY
from unipar.benchmark.recommend import name
from unipar.benchmark.report import text
from unipar.benchmark.result import BenchResult, CellResult, Job, Machine
from unipar.benchmark.rounds import slowest, step_time
from unipar.benchmark.statistics import LEAST, Estimate, Spread, Verdict
from unipar.errors import ConfigError

ONE_RUN = 0.05
"""Changes below this are none where a side has one run: its repeats share what differs by run."""

Kind = Literal["failed", "drift", "regression"]


class Worse(BaseModel, frozen=True):
    """One thing that became worse.

    Attributes:
        kind: ``"failed"``: it ran before; ``"drift"``: its loss was right before; or
            ``"regression"``: it is slower or holds more.
        words: the same for people.
    """

    kind: Kind
    words: str


class Change(BaseModel, frozen=True):
    """One cell, before and after.

    Attributes:
        cell: its shape.
        before: what was found, in all runs.
        after: what was found later, likewise.
        time: ratio of step times; ``None`` where one has none.
        time_verdict: whether steps take more time, or less.
        memory: ratio of the peaks of the fullest rank; ``None`` where one has none.
        memory_verdict: whether more memory is held, or less.
        worse: what became worse.
    """

    cell: Cell
    before: CellResult
    after: CellResult
    time: Estimate | None
    time_verdict: Verdict
    memory: Estimate | None
    memory_verdict: Verdict
    worse: list[Worse]

    @property
    def regressions(self) -> list[str]:
        """All that became worse, in words."""
        return [one.words for one in self.worse]

    @property
    def undecided(self) -> bool:
        """Whether it was measured on both sides, and the noise hides how it changed."""
        return bool(
            (self.time and self.time_verdict == "unknown")
            or (self.memory and self.memory_verdict == "unknown")
        )


class Comparison(BaseModel, frozen=True):
    """Two builds, or two states of anything, by results of one job.

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
        """All that became worse, in words, but for loops written by hand: they are not unipar's."""
        return [
            f"{name(change.after)}: {one}" for change in self._own for one in change.regressions
        ]

    @property
    def undecided(self) -> list[str]:
        """Names of the cells of which the noise hides whether they became slower or fuller."""
        return [name(change.after) for change in self._own if change.undecided]

    def is_worse(self, kinds: Collection[Kind]) -> bool:
        """Return whether anything of these kinds was found."""
        return any(one.kind in kinds for change in self._own for one in change.worse)

    @property
    def _own(self) -> list[Change]:
        return [change for change in self.changes if not change.cell.raw]


def compare(
    before: BenchResult | Sequence[BenchResult],
    after: BenchResult | Sequence[BenchResult],
    least: float | None = None,
) -> Comparison:
    """Set cells of equal shape beside each other.

    With two or more runs on both sides a run is what counts once in an interval, for two runs of
    one build differ by more than the repeats of one. With a single run its repeats must do.

    Args:
        before: the earlier result, or the results of several runs.
        after: the later one, or several.
        least: the smallest relative change of time or memory that counts, even beyond the noise;
            left out: :data:`~unipar.benchmark.statistics.LEAST`, or :data:`ONE_RUN`.

    Raises:
        ConfigError: they are of different jobs, or have no cell in common.
    """
    sides = [[one] if isinstance(one, BenchResult) else list(one) for one in (before, after)]
    several = min(map(len, sides)) > 1
    if least is None:
        least = LEAST if several else ONE_RUN
    first = sides[0][0]
    for other in (*sides[0][1:], *sides[1]):
        _check_same_job(first, other)
    earlier, later = (_by_cell(side) for side in sides)
    both = [cell for cell in later if cell in earlier]
    if not both:
        raise ConfigError(
            "these results have no cell in common: before there were "
            f"{_names(earlier)}, and after {_names(later)}."
        )
    return Comparison(
        changes=[_change(earlier[cell], later[cell], least, by_run=several) for cell in both],
        only_before=[name(runs[0]) for cell, runs in earlier.items() if cell not in later],
        only_after=[name(runs[0]) for cell, runs in later.items() if cell not in earlier],
        warnings=_warnings(sides[0], sides[1]),
        least=least,
    )


def _check_same_job(before: BenchResult, after: BenchResult) -> None:
    if apart := _different_jobs(before.job, after.job):
        raise ConfigError(
            f"these are two different jobs, whose times say nothing of each other: "
            f"{'; '.join(apart)}. Compare results of the same run file."
        )


def _by_cell(side: Sequence[BenchResult]) -> dict[Cell, list[CellResult]]:
    found: dict[Cell, list[CellResult]] = {}
    for result in side:
        for one in result.cells:
            found.setdefault(one.cell, []).append(one)
    return found


def _change(
    earlier: Sequence[CellResult], later: Sequence[CellResult], least: float, *, by_run: bool
) -> Change:
    before, after = _pooled(earlier), _pooled(later)
    time = _ratio(_step_times(later, by_run), _step_times(earlier, by_run))
    memory = _ratio(_peaks(later, by_run), _peaks(earlier, by_run))
    time_verdict = time.verdict(least) if time else "unknown"
    if max(_loads([*earlier, *later]), default=0.0) > BUSY:
        time_verdict = "unknown"
    memory_verdict = memory.verdict(least) if memory else "unknown"
    worse: list[tuple[Kind, str]] = []
    if before.status == "measured" and after.status != "measured":
        told = f"it was measured before, and now: {after.status}. {after.reason}".strip()
        worse.append(("failed", told))
    if time and time_verdict == "more":
        told = f"a step takes {time.median:.3f} times as long (95 % interval {time.low:.3f} to "
        worse.append(("regression", f"{told}{time.high:.3f})"))
    if memory and memory_verdict == "more":
        most = text.size(max(_peaks(later, by_run)))
        told = f"the fullest rank holds {most}, {memory.median:.3f} times as much"
        worse.append(("regression", told))
    if after.parity and after.parity.drifts and not (before.parity and before.parity.drifts):
        told = (
            f"its loss drifts by {text.difference(after.parity.difference)} from "
            f"{after.parity.reference}"
        )
        worse.append(("drift", told))
    return Change(
        cell=after.cell,
        before=before,
        after=after,
        time=time,
        time_verdict=time_verdict,
        memory=memory,
        memory_verdict=memory_verdict,
        worse=[Worse(kind=kind, words=words) for kind, words in worse],
    )


def _pooled(runs: Sequence[CellResult]) -> CellResult:
    """One cell with the trials of all runs; where one has none, or a wrong loss, that one."""
    odd = [one for one in runs if one.status != "measured"]
    odd += [one for one in runs if one.parity and one.parity.drifts]
    chosen = (odd or runs)[0]
    trials = [trial for one in runs for trial in one.trials]
    if len(runs) == 1 or chosen.status != "measured":
        return chosen
    steps = [seconds for trial in trials for seconds in slowest(trial)]
    return chosen.model_copy(update={"trials": trials, "step_seconds": Spread.of(steps)})


def _ratio(after: Sequence[float], before: Sequence[float]) -> Estimate | None:
    if not after or not before or min(*after, *before) <= 0:
        return None
    return Estimate.unpaired(after, before)


def _step_times(runs: Sequence[CellResult], by_run: bool) -> list[float]:
    return _values(([step_time(trial) for trial in one.trials] for one in runs), by_run)


def _peaks(runs: Sequence[CellResult], by_run: bool) -> list[float]:
    """Of the fullest rank, in bytes."""
    held = (
        [[rank.memory.peak for rank in trial.ranks if rank.memory] for trial in one.trials]
        for one in runs
    )
    return _values(([float(max(peaks)) for peaks in run if peaks] for run in held), by_run)


def _values(runs: Iterable[list[float]], by_run: bool) -> list[float]:
    """One for each run, or one for each repeat."""
    known = [repeats for repeats in runs if repeats]
    if by_run:
        return [statistics.median(repeats) for repeats in known]
    return [value for repeats in known for value in repeats]


def _loads(cells: Iterable[CellResult]) -> list[float]:
    return [cell.load for cell in cells if cell.load is not None]


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


def _warnings(earlier: Sequence[BenchResult], later: Sequence[BenchResult]) -> list[str]:
    before, after = earlier[0], later[0]
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
    repeats = [sum(one.job.repeats for one in side) for side in (earlier, later)]
    if min(repeats) < 2:
        found.append(
            "one of them has one repeat, which shows no noise: nothing can be marked. Run it again "
            "with the same --output and --repeats 5"
        )
    for when, side in (("before", earlier), ("after", later)):
        load = max(_loads(cell for one in side for cell in one.cells), default=0.0)
        if load > BUSY:
            found.append(
                f"other processes had up to {text.percent(load)} of the cores {when}: the times "
                "of these cells say nothing of what was changed"
            )
    return found


def _machines(before: Machine, after: Machine) -> list[tuple[str, str, str]]:
    return [
        ("processor", before.processor, after.processor),
        ("cores", str(before.cores), str(after.cores)),
        ("accelerators", ", ".join(before.accelerators), ", ".join(after.accelerators)),
        ("system", before.system, after.system),
    ]


def _names(cells: dict[Cell, list[CellResult]]) -> str:
    return text.join(name(runs[0]) for runs in cells.values()) if cells else "none"
