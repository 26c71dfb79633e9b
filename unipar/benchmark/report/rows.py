"""The table of a result, before it is drawn: which columns, what is best in each, what failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from unipar.benchmark.recommend import peak
from unipar.benchmark.report import text
from unipar.benchmark.result import BenchResult, CellResult, Overhead

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
    """

    text: str
    value: float | str | None
    best: bool = False
    drifts: bool = False
    ties: bool = False


@dataclass(frozen=True)
class Column:
    """One column, its unit with its name.

    Attributes:
        title: what it is.
        short: the same where there is little room.
        unit: of its figures, or empty.
        figures: one for each row.
    """

    title: str
    short: str
    unit: str
    figures: list[Figure]


@dataclass(frozen=True)
class Failure:
    """A cell without a measurement, and why."""

    name: str
    status: str
    reason: str


@dataclass(frozen=True)
class Rows:
    """The cells that were measured, the fastest first, and those that were not."""

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
    cells = [cell for cell in result.measured if not cell.cell.raw]
    speeds = [cell.items_per_second.median if cell.items_per_second else None for cell in cells]
    steps = [cell.step_seconds for cell in cells]
    # Where no winner can be named, no figure of speed is the best.
    low, high = ("low", "high") if result.winner else (None, None)
    second = text.unit_of_seconds(step.median for step in steps if step)
    flat = [result.row(cell) for cell in cells]
    peaks, traffic = [peak(cell) for cell in cells], [row["traffic_bytes"] for row in flat]
    columns = [
        Column(
            "strategy", "strategy", "", [Figure(cell.cell.label, cell.cell.label) for cell in cells]
        ),
        Column("devices", "dev.", "", [_count(cell.cell.devices) for cell in cells]),
        _numbers("step", second, [step and step.median for step in steps], cells, low),
        Column(
            "p5-p95",
            "p5-p95",
            second.name,
            [
                Figure(
                    f"{text.number(step.p5 / second.size)}-{text.number(step.p95 / second.size)}",
                    step.p95 - step.p5,
                )
                if step
                else Figure("", None)
                for step in steps
            ],
        ),
        _throughput(speeds, cells, high),
        _numbers("MFU", text.Unit("%", 0.01), [cell.mfu for cell in cells], cells, high),
        _numbers("peak", text.unit_of_bytes(peaks), peaks, cells, "low"),
        _numbers("traffic", text.unit_of_bytes(traffic), traffic, cells, "low"),
        Column("loss difference", "loss\ndiff.", "", [_parity(cell) for cell in cells]),
    ]
    known = [column for column in columns if any(one.value is not None for one in column.figures)]
    failures = [
        Failure(f"{cell.cell.label} on {text.devices(cell.cell.devices)}", cell.status, cell.reason)
        for cell in result.cells
        if cell.status != "measured"
    ]
    return Rows(known, _ties(cells), [_overhead(one) for one in result.overhead], failures)


def _numbers(
    title: str,
    unit: text.Unit,
    values: Sequence[float | None],
    cells: Sequence[CellResult],
    better: _Better,
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
    return Column(title, title, unit.name, figures)


def _throughput(
    speeds: Sequence[float | None], cells: Sequence[CellResult], better: _Better
) -> Column:
    plain = _numbers("items/s", text.Unit("", 1.0), speeds, cells, better)
    labels = {(cell.cell.label, cell.cell.devices) for cell in cells}
    tied = [
        any((label, cell.cell.devices) in labels for label in cell.ties if label != cell.cell.label)
        for cell in cells
    ]
    figures = [replace(one, ties=ties) for one, ties in zip(plain.figures, tied, strict=True)]
    return replace(plain, figures=figures)


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
