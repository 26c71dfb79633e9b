"""Two results beside each other: for a terminal, as Markdown, and as CSV."""

from __future__ import annotations

import csv as csv_writer
import io
from collections.abc import Callable, Iterable
from typing import Any, Literal

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.text import Text

from unipar.benchmark.compare import Change, Comparison
from unipar.benchmark.recommend import peak
from unipar.benchmark.report import text
from unipar.benchmark.result import CellResult
from unipar.utils.fitted_table import OPTIONS, FittedTable

_TIME = {"more": "slower!", "less": "faster", "same": "same", "unknown": "?"}
_HEAD = (
    "strategy",
    "dev.",
    "before\nms",
    "after\nms",
    "ratio",
    "95 %\ninterval",
    "time",
    "peak\nMiB",
    "ratio",
    "loss\ndiff.",
)
# What is left out of a narrow terminal, the highest first.
_RANKS = (0, 1, 4, 3, 2, 6, 1, 7, 5, 8)


class TerminalComparison:
    """The view of a terminal; it fits the width that it finds, and is clear without color."""

    def __init__(self, found: Comparison) -> None:
        self._found = found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The warnings first, for they say what the rest is worth; what became worse last."""
        for warning in self._found.warnings:
            yield Text(f"Careful: {warning}", style="bold yellow")
        yield _table(self._found)
        yield from (Text(line) for line in _others(self._found))
        yield from _verdict(self._found)


def terminal(found: Comparison) -> TerminalComparison:
    """Lay out a comparison for rich."""
    return TerminalComparison(found)


def markdown(found: Comparison) -> str:
    """The same as Markdown."""
    head = [title.replace("\n", " ") for title in _HEAD]
    line = [":--" if index == 0 else "--:" for index in range(len(head))]
    body = [
        [f"**{word}**" if word.endswith("!") else word.replace("|", r"\|") for word in _row(change)]
        for change in _measured(found)
    ]
    parts = [f"**Careful**: {warning}." for warning in found.warnings]
    parts.append("\n".join(f"| {' | '.join(row)} |" for row in [head, line, *body]))
    parts += _others(found)
    if found.regressions:
        parts.append("Worse than before:\n\n" + "\n".join(f"- {one}" for one in found.regressions))
    parts += [f"{line}." for line in _calm(found)]
    return "\n\n".join(parts) + "\n"


def csv(found: Comparison) -> str:
    """Every cell that both have, with all digits: seconds and bytes."""
    file = io.StringIO()
    writer = csv_writer.DictWriter(file, list(_flat(found.changes[0])), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_flat(change) for change in found.changes)
    return file.getvalue()


FORMATS: dict[str, Callable[[Comparison], RenderableType]] = {
    "table": terminal,
    "markdown": markdown,
    "csv": csv,
}
"""By the name that the command line has for each."""


def render(
    found: Comparison, format: Literal["table", "markdown", "csv"] = "table"
) -> RenderableType:
    """Render for rich; Markdown and CSV are text."""
    return FORMATS[format](found)


def _table(found: Comparison) -> FittedTable:
    table = FittedTable(elsewhere="give --format csv")
    for title, rank in zip(_HEAD, _RANKS, strict=True):
        if rank:
            table.add_column(title, rank, right=True)
        else:
            table.add_column(title, rank, breaks=OPTIONS)
    for change in _measured(found):
        style = "bold red" if change.regressions else ""
        table.add_row(*(Text(word, style=style) for word in _row(change)))
    return table


def _measured(found: Comparison) -> list[Change]:
    return [change for change in found.changes if change.time]


def _row(change: Change) -> list[str]:
    time, memory = change.time, change.memory
    held = peak(change.after)
    mark = {"more": "!", "unknown": "?"}.get(change.memory_verdict, "")
    return [
        change.cell.label,
        str(change.cell.devices),
        _milliseconds(change.before),
        _milliseconds(change.after),
        f"{time.median:.3f}" if time else "",
        f"{time.low:.3f}-{time.high:.3f}" if time and time.pairs > 1 else "",
        _TIME[change.time_verdict],
        "" if held is None else text.number(held / 2**20),
        f"{memory.median:.3f}{mark}" if memory else "",
        _parity(change.after),
    ]


def _milliseconds(result: CellResult) -> str:
    return text.number(result.step_seconds.median * 1e3) if result.step_seconds else ""


def _parity(result: CellResult) -> str:
    if result.parity is None:
        return ""
    return text.difference(result.parity.difference) + "!" * result.parity.drifts


def _others(found: Comparison) -> list[str]:
    """List what stands in no table: cells that were not measured twice."""
    lines = [
        f"{change.cell.label} on {text.devices(change.cell.devices)}: {change.before.status} "
        f"before, {change.after.status} after."
        for change in found.changes
        if not change.time
    ]
    if found.only_before:
        lines.append(f"Only before: {text.join(found.only_before)}.")
    if found.only_after:
        lines.append(f"Only after: {text.join(found.only_after)}.")
    return lines


def _verdict(found: Comparison) -> Iterable[Text]:
    if found.regressions:
        yield Text("Worse than before", style="bold red")
        yield from (Text(f"  {one}") for one in found.regressions)
    style = "bold yellow" if found.undecided else "bold green"
    yield from (Text(f"{line}.", style=style) for line in _calm(found))


def _calm(found: Comparison) -> list[str]:
    """Say what there is to say where not everything became worse."""
    if found.undecided:
        return [
            f"Cannot tell whether these became worse, for the noise hides it (?): "
            f"{text.join(found.undecided)}"
        ]
    return [] if found.regressions else ["Nothing became worse beyond the noise"]


def _flat(change: Change) -> dict[str, Any]:
    before, after, time, memory = change.before, change.after, change.time, change.memory
    return {
        **change.cell.model_dump(),
        "status_before": before.status,
        "status_after": after.status,
        "step_seconds_before": before.step_seconds.median if before.step_seconds else None,
        "step_seconds_after": after.step_seconds.median if after.step_seconds else None,
        "time_ratio": time.median if time else None,
        "time_ratio_low": time.low if time else None,
        "time_ratio_high": time.high if time else None,
        "time": _TIME[change.time_verdict].rstrip("!"),
        "peak_bytes_before": peak(before),
        "peak_bytes_after": peak(after),
        "memory_ratio": memory.median if memory else None,
        "memory": change.memory_verdict if memory else None,
        "loss_difference_before": before.parity.difference if before.parity else None,
        "loss_difference_after": after.parity.difference if after.parity else None,
        "drifts_after": after.parity.drifts if after.parity else None,
        "regressions": "; ".join(change.regressions),
    }
