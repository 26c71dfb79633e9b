"""Runs in a terminal: a table of several, and a page with curves of one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from unipar.callbacks.text import count, duration
from unipar.train.watching.chart import Point, bounds, curve
from unipar.train.watching.files import line, number, whole
from unipar.train.watching.runs import Run, read_metrics
from unipar.utils.fitted_table import NOWHERE, OPTIONS, FittedTable

_COLORS = {"running": "cyan", "finished": "green", "failed": "red", "lost": "red"}
_MARGIN = 10
_SHOWN_STARTS = 6
UNKNOWN = "?"


def table(runs: Sequence[Run]) -> Group:
    """A row for each run, and below it why runs have failed, and what could not be read."""
    made = FittedTable(elsewhere="`unipar runs --json` has all")
    made.add_column("run", 0, breaks=NOWHERE)
    made.add_column("state", 1)
    made.add_column("strategy", 5, breaks=OPTIONS)
    for column, rank in {"ranks": 6, "step": 2, "loss": 4, "items/s": 7}.items():
        made.add_column(column, rank, right=True)
    # The title alone: "ago" below each time would double the table's height.
    made.add_column("last change", 3, right=True, breaks="(?<=last )")
    notes = []
    for run in runs:
        made.add_row(
            Text(line(run.name) or UNKNOWN),
            _state(run),
            Text(run.strategy or UNKNOWN),
            _or_unknown(run.ranks),
            _steps(run),
            UNKNOWN if run.loss is None else f"{run.loss:.4f}",
            UNKNOWN if run.items_per_second is None else count(run.items_per_second),
            _ago(run),
        )
        notes += [Text(f"{line(run.name)}: {note}") for note in _notes(run)]
    return Group(made, *notes)


def page(run: Run, width: int, *, plain: bool) -> Group:
    """What is known of a run, and curves over its steps.

    Args:
        run: the run.
        width: columns of the terminal.
        plain: without characters that not every terminal has.
    """
    head = Table.grid(padding=(0, 2))
    head.add_column(no_wrap=True, style="bold")
    head.add_column(overflow="fold")
    head.add_row("run", Text(str(run.directory)))
    head.add_row("state", Text.assemble(_state(run), f", last change {_ago(run)}"))
    head.add_row("step", _steps(run))
    if run.loss is not None:
        head.add_row("loss", f"{run.loss:.6g}")
    for label, text in (*_starts(run), *_changes(run), *_last_of_kind(run)):
        head.add_row(label, Text(text))
    for note in _notes(run):
        head.add_row("note", Text(note))
    return Group(head, *_curves(run, max(20, width - _MARGIN - 1), plain))


def _curves(run: Run, width: int, plain: bool) -> list[Text]:
    metrics = read_metrics(run)
    started = _of_kind(run, "started")
    last = max([run.step or 0, *(row["step"] for row in metrics)])
    drawn = [
        ("loss", 8, _points(metrics, "loss")),
        ("eval/loss", 5, _points(metrics, "eval/loss")),
        ("items/s", 5, _points(metrics, "items_per_second")),
    ]
    ranks = _ranks(started, last)
    if len({y for _, y in ranks}) > 1:
        drawn.append(("ranks", 2, ranks))
    drawn = [one for one in drawn if one[2]]
    if not drawn:
        return [Text("\nnothing to draw: no step was logged yet")]
    first = min(points[0][0] for _, _, points in drawn)
    ends = first, max(points[-1][0] for _, _, points in drawn)
    texts = []
    for name, height, points in drawn:
        low, high = bounds(points)
        labels = [_value(high), *[""] * (height - 2), _value(low)]
        lines = curve(points, width, height, ends, plain)
        rows = [f"{label:>{_MARGIN - 1}} {row}" for label, row in zip(labels, lines, strict=True)]
        texts.append(Text(f"\n{name:>{_MARGIN - 1}}", style="bold"))
        texts += [Text(row, no_wrap=True, style="cyan") for row in rows]
    begin, end = f"step {ends[0]:.0f}", f"{ends[1]:.0f}"
    texts.append(Text(" " * _MARGIN + begin + end.rjust(width - len(begin)), no_wrap=True))
    marks = _marks([whole(row.get("step")) for row in started[1:]], ends, width)
    if marks:
        texts.append(Text(" " * _MARGIN + marks, no_wrap=True, style="yellow"))
        texts.append(Text(" " * _MARGIN + "^ resumed, or started again", style="dim"))
    return texts


def _points(metrics: Sequence[dict[str, Any]], name: str) -> list[Point]:
    found = ((row["step"], number(row.get(name))) for row in metrics)
    return sorted((float(step), value) for step, value in found if value is not None)


def _ranks(started: Sequence[dict[str, Any]], last: int) -> list[Point]:
    """The number of ranks over the steps: of steps that were taken again, the last time."""
    points: list[Point] = []
    for row in started:
        step, ranks = whole(row.get("step")), whole(row.get("world_size"))
        if step is None or ranks is None:
            continue
        points = [(x, y) for x, y in points if x < step]
        if points:
            points.append((float(step), points[-1][1]))
        points.append((float(step), float(ranks)))
    return [*points, (float(last), points[-1][1])] if points else []


def _marks(steps: Sequence[int | None], ends: Point, width: int) -> str:
    marks = [" "] * width
    first, last = ends
    for step in steps:
        if step is not None and first <= max(step, first) <= last:
            share = (max(step, first) - first) / (last - first) if last > first else 0.0
            marks[round(share * (width - 1))] = "^"
    return "".join(marks).rstrip()


def _starts(run: Run) -> list[tuple[str, str]]:
    """How the run was started each time, of many the last times."""
    started = _of_kind(run, "started")
    if not started:
        return [("strategy", f"{run.strategy or UNKNOWN}; ranks, hosts and launcher are unknown")]
    found = []
    for number_of, row in list(enumerate(started))[-_SHOWN_STARTS:]:
        label = "started" if number_of == 0 else f"start {number_of + 1}"
        hosts = row.get("hosts")
        places = [line(host, 60) or UNKNOWN for host in hosts] if isinstance(hosts, list) else []
        shown = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
        again = f", restart {row['restart']}" if whole(row.get("restart")) else ""
        found.append(
            (
                label,
                f"{_clock(row)} at step {_or_unknown(whole(row.get('step')))}: "
                f"{line(row.get('strategy')) or UNKNOWN} on "
                f"{_or_unknown(whole(row.get('world_size')))} x "
                f"{line(row.get('device')) or UNKNOWN} on {shown or UNKNOWN}, "
                f"launcher {line(row.get('launcher')) or UNKNOWN}{again}",
            )
        )
    return found


def _changes(run: Run) -> list[tuple[str, str]]:
    """Other numbers of ranks that the run went on with, of many the last ones."""
    found = []
    for row in _of_kind(run, "changed")[-_SHOWN_STARTS:]:
        step, before, after, repeated = (
            _or_unknown(whole(row.get(name))) for name in ("step", "before", "after", "repeated")
        )
        seconds = number(row.get("seconds"))
        lost = UNKNOWN if seconds is None else f"{seconds:.1f}"
        text = f"at step {step}: {before} -> {after} ranks, {line(row.get('why')) or UNKNOWN}; "
        found.append(("changed", f"{text}{lost} s and {repeated} steps lost"))
    return found


def _last_of_kind(run: Run) -> list[tuple[str, str]]:
    found = []
    if saved := _of_kind(run, "saved"):
        found.append(("checkpoint", f"{_clock(saved[-1])} {_place(run, saved[-1])}"))
    slow: dict[int, str] = {}
    for row in run.events:
        rank = whole(row.get("rank"))
        if rank is not None and row.get("event") == "slow":
            slow[rank] = f"rank {rank} on {line(row.get('host'))}, since {_clock(row)}"
        elif row.get("event") in ("recovered", "started"):
            slow = {} if rank is None else {one: at for one, at in slow.items() if one != rank}
    return found + [("slow", text) for _, text in sorted(slow.items())]


def _place(run: Run, row: dict[str, Any]) -> str:
    """A checkpoint's path, from the run's directory if it lies there."""
    path = line(row.get("path"), 4096)
    return UNKNOWN if path is None else path.removeprefix(f"{run.directory.resolve()}/")


def _of_kind(run: Run, event: str) -> list[dict[str, Any]]:
    return [row for row in run.events if row.get("event") == event]


def _notes(run: Run) -> list[str]:
    return ([run.why] if run.why and run.state == "failed" else []) + run.problems


def _state(run: Run) -> Text:
    text = f"{run.state} ({run.why})" if run.state == "interrupted" and run.why else run.state
    return Text(text, style=_COLORS.get(run.state, "yellow"))


def _steps(run: Run) -> str:
    step = _or_unknown(run.step)
    return step if run.total_steps is None else f"{step}/{run.total_steps}"


def _or_unknown(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _ago(run: Run) -> str:
    return f"{duration(run.idle)} ago" if run.changed else UNKNOWN


def _clock(row: dict[str, Any]) -> str:
    moment = number(row.get("time"))
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment)) if moment else UNKNOWN
    except (ValueError, OverflowError, OSError):
        return UNKNOWN


def _value(value: float) -> str:
    return count(value) if abs(value) >= 1000 else f"{value:.4g}"
