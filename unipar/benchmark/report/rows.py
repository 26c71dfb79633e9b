"""The table of a result, before it is drawn: which columns, what is best in each, what failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from unipar.benchmark.recommend import peak
from unipar.benchmark.report import text
from unipar.benchmark.result import BenchResult, CellResult, Overhead
from unipar.benchmark.statistics import Spread

_Better = Literal["low", "high"] | None


@dataclass(frozen=True)
class Figure:
    """One entry of the table.

    Attributes:
        text: what is written.
        value: what it is sorted by; ``None`` where it is not known.
        best: whether none in its column is better, and some are worse.
        drifts: whether it is the difference of a loss that drifts.
        ties: whether it is the throughput of one of several that are equally fast.
        failed: whether it says why there are no figures.
    """

    text: str
    value: float | str | None
    best: bool = False
    drifts: bool = False
    ties: bool = False
    failed: bool = False


@dataclass(frozen=True)
class Column:
    """One column, its unit with its name.

    Attributes:
        title: what it is.
        short: the same where there is little room.
        unit: of its figures, or empty.
        figures: one for each row.
        rank: the larger, the sooner it is left out where there is little room; 0: never.
        first: the way round in which it is sorted first.
    """

    title: str
    short: str
    unit: str
    figures: list[Figure]
    rank: int = 0
    first: Literal["ascending", "descending"] = "ascending"


@dataclass(frozen=True)
class Failure:
    """A cell without a measurement, and why."""

    name: str
    status: str
    reason: str


@dataclass(frozen=True)
class Rows:
    """The cells that were measured, the fastest first, and then those that were not."""

    columns: list[Column]
    ties: list[str]
    overheads: list[str]
    failures: list[Failure]

    @property
    def rows(self) -> list[list[Figure]]:
        """By row."""
        return [list(row) for row in zip(*(column.figures for column in self.columns), strict=True)]


def of(result: BenchResult) -> Rows:
    """Every figure that was measured for at least one cell; a column without one is left out.

    A hand-written loop says nothing of items, memory and traffic: it is told by its ratio alone.
    """
    offered = [cell for cell in result.cells if not cell.cell.raw]
    cells = [cell for cell in result.measured if not cell.cell.raw]
    cells += [cell for cell in offered if cell.items_per_second is None]
    speeds = [cell.items_per_second.median if cell.items_per_second else None for cell in cells]
    steps = [cell.step_seconds for cell in cells]
    # Where no winner can be named, no figure of speed is the best.
    low, high = ("low", "high") if result.winner else (None, None)
    second = text.unit_of_seconds(step.median for step in steps if step)
    flat = [result.row(cell) for cell in cells]
    peaks, traffic = [peak(cell) for cell in cells], [row["traffic_bytes"] for row in flat]
    flops = [result.flops_per_second(cell) for cell in cells]
    formulas = [cell.bubble_formula for cell in cells]
    percent = text.Unit("%", 0.01)
    columns = [
        Column(
            "strategy", "strategy", "", [Figure(cell.cell.label, cell.cell.label) for cell in cells]
        ),
        Column("devices", "dev.", "", [_count(cell.cell.devices) for cell in cells]),
        Column("outcome", "outcome", "", [_outcome(cell) for cell in cells]),
        _numbers("step", second, [step and step.median for step in steps], cells, low),
        Column("p5-p95", "p5-p95", second.name, [_range(step, second) for step in steps], rank=5),
        _numbers("spread", percent, [row["spread"] for row in flat], cells, None, rank=6),
        _throughput(f"{result.item}s/s", speeds, cells, high),
        _numbers("TFLOP/s", text.Unit("", 1e12), flops, cells, high, rank=3),
        _numbers("MFU", percent, [cell.mfu for cell in cells], cells, high, rank=4),
        _numbers("peak", text.unit_of_bytes(peaks), peaks, cells, "low"),
        _numbers("traffic", text.unit_of_bytes(traffic), traffic, cells, "low", rank=2),
        _numbers("bubble", percent, [row["bubble"] for row in flat], cells, None),
        replace(
            _numbers("bubble by formula", percent, formulas, cells, None, rank=1),
            short="by\nformula",
        ),
        _numbers("load", percent, [cell.load for cell in cells], cells, None, rank=7),
        Column("loss difference", "loss\ndiff.", "", [_parity(cell) for cell in cells]),
    ]
    known = [column for column in columns if any(one.value is not None for one in column.figures)]
    failures = [
        Failure(f"{cell.cell.label} on {text.devices(cell.cell.devices)}", cell.status, cell.reason)
        for cell in result.cells
        if cell.status != "measured"
    ]
    return Rows(known, _ties(cells), [_overhead(one) for one in result.overhead], failures)


def _range(step: Spread | None, unit: text.Unit) -> Figure:
    if step is None:
        return Figure("", None)
    ends = f"{text.number(step.p5 / unit.size)}-{text.number(step.p95 / unit.size)}"
    return Figure(ends, step.p95 - step.p5)


def _outcome(cell: CellResult) -> Figure:
    """Describe what is not as it should be; where all is, the column is left out."""
    drifts = bool(cell.parity and cell.parity.drifts)
    word = "drifts" if drifts else "" if cell.status == "measured" else cell.status
    return Figure(word, word or None, drifts=drifts, failed=not drifts and bool(word))


def _numbers(
    title: str,
    unit: text.Unit,
    values: Sequence[float | None],
    cells: Sequence[CellResult],
    better: _Better,
    rank: int = 0,
) -> Column:
    # Nothing at all, as the traffic of one process, is no achievement; nor is a fast wrong run.
    fair = [
        value
        for value, cell in zip(values, cells, strict=True)
        if value and not (cell.parity and cell.parity.drifts)
    ]
    best = None
    if better and len(set(fair)) > 1:
        best = min(fair) if better == "low" else max(fair)
    figures = []
    for value, cell in zip(values, cells, strict=True):
        wins = value is not None and value == best and not (cell.parity and cell.parity.drifts)
        written = "" if value is None else text.number(value / unit.size)
        figures.append(Figure(written, value, best=wins))
    first = "descending" if better == "high" else "ascending"
    return Column(title, title, unit.name, figures, rank, first)


def _throughput(
    title: str, speeds: Sequence[float | None], cells: Sequence[CellResult], better: _Better
) -> Column:
    plain = _numbers(title, text.Unit("", 1.0), speeds, cells, better)
    labels = {(cell.cell.label, cell.cell.devices) for cell in cells}
    tied = [
        any((label, cell.cell.devices) in labels for label in cell.ties if label != cell.cell.label)
        for cell in cells
    ]
    figures = [replace(one, ties=ties) for one, ties in zip(plain.figures, tied, strict=True)]
    return replace(plain, figures=figures, first="descending")


def _count(value: int) -> Figure:
    return Figure(str(value), value)


def _parity(cell: CellResult) -> Figure:
    if cell.parity is None:
        return Figure("", None)
    apart = cell.parity.difference
    return Figure(text.difference(apart), apart, drifts=cell.parity.drifts)


def _ties(cells: Sequence[CellResult]) -> list[str]:
    """Those that are equally fast; who is in one of these lists need not be said again."""
    groups: list[tuple[int, list[str]]] = []
    for place, cell in enumerate(cells):
        count = cell.cell.devices
        slower = [one.cell.label for one in cells[place + 1 :] if one.cell.devices == count]
        group = [cell.cell.label, *(label for label in slower if label in cell.ties)]
        told = any(count == at and set(group) <= set(others) for at, others in groups)
        if len(group) > 1 and not told:
            groups.append((count, group))
    return [f"{text.join(group)} on {text.devices(count)}" for count, group in groups]


def _overhead(one: Overhead) -> str:
    interval = f"95 % interval {one.ratio.low:.3f}-{one.ratio.high:.3f}, {one.ratio.pairs} rounds"
    if one.ratio.pairs == 1:
        interval = "one round, so the noise is not known"
    return f"{one.label} on {text.devices(one.devices)}: {one.ratio.median:.3f} ({interval})"
