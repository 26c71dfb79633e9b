"""The table of a result: for a terminal, as Markdown, and as CSV."""

from __future__ import annotations

import csv as csv_writer
import io
import re
from collections.abc import Iterable
from dataclasses import replace

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from unipar.benchmark.report import answers, rows, text
from unipar.benchmark.report.rows import Column, Figure, Rows
from unipar.benchmark.result import BenchResult

ROOMY = 110
"""Columns of a terminal in which the longest names stand on one line."""

_LEGEND = {
    "best": "* best of its column",
    "ties": "~ as fast as another on as many devices, within the noise",
    "drifts": "! drifts: the loss differs by more than rounding explains",
}


class TerminalReport:
    """The view of a terminal; it fits the width that it finds, and is clear without color."""

    def __init__(self, result: BenchResult) -> None:
        self._rows = rows.of(result)
        self._result = result

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Table, ties, overhead, failures, and the recommendation last."""
        found = self._rows
        if told := answers.incomplete(self._result):
            yield Text(told, style="bold yellow")
        if found.columns:
            drawn, hidden = _fitted(found, console, options)
            yield drawn
            yield from _legend(found)
            if hidden:
                told = f"There is no room here for {text.join(hidden)}: see table.csv."
                yield Text(told, style="dim")
        yield from _list("Equally fast, within the noise", found.ties)
        yield from _list("Step time beside a loop written by hand", found.overheads)
        yield from _list("Not measured", _failures(found), style="red")
        yield Text()
        yield Text(self._result.recommendation, style="bold")
        for question, answer in answers.of(self._result):
            yield Text.assemble((f"  {question}: ", "bold"), answer)


def terminal(result: BenchResult) -> TerminalReport:
    """Lay out for rich: the table sorted by throughput, then what failed, then what to pick."""
    return TerminalReport(result)


def markdown(result: BenchResult) -> str:
    """The same as Markdown, for an issue, a pull request or a page of documentation."""
    found = rows.of(result)
    parts = [f"**{told}**"] if (told := answers.incomplete(result)) else []
    if found.columns:
        head = [" ".join(filter(None, (one.title, one.unit))) for one in found.columns]
        line = [":--" if index == 0 else "--:" for index in range(len(head))]
        body = [
            [_emphasized(figure, code=index == 0) for index, figure in enumerate(row)]
            for row in found.rows
        ]
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in [head, line, *body]))
        parts.append("**Bold**: best of its column. ~: as fast as another, within the noise.")
    for title, lines in (
        ("Equally fast, within the noise", found.ties),
        ("Step time beside a loop written by hand", found.overheads),
        ("Not measured", _failures(found)),
    ):
        if lines:
            parts.append(f"{title}:\n\n" + "\n".join(f"- {_flat(line)}" for line in lines))
    parts.append(result.recommendation)
    if told := answers.of(result):
        parts.append("\n".join(f"- {question}: {_flat(answer)}" for question, answer in told))
    return "\n\n".join(parts) + "\n"


def csv(result: BenchResult) -> str:
    """Every cell, those without a measurement too, with all digits: seconds and bytes."""
    file = io.StringIO()
    flat = [result.row(cell) for cell in result.cells]
    writer = csv_writer.DictWriter(file, list(flat[0]) if flat else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return file.getvalue()


def _fitted(found: Rows, console: Console, options: ConsoleOptions) -> tuple[Table, list[str]]:
    """The table with as many columns as there is room for, and the names of the others."""
    columns, hidden = list(found.columns), []
    endless = options.update(width=10 * options.max_width)
    cut_names, short = options.max_width < ROOMY, False
    while True:
        table = _table(replace(found, columns=columns), cut_names=cut_names, short=short)
        least = max(columns, key=lambda column: column.rank)
        if Measurement.get(console, endless, table).maximum <= options.max_width:
            return table, hidden
        if not short:
            short = True
        elif not cut_names and not least.rank:
            cut_names = True
        elif not least.rank:
            return table, hidden
        else:
            columns.remove(least)
            hidden.append(least.title)


def _table(found: Rows, *, cut_names: bool, short: bool) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0) if short else (0, 1), pad_edge=False)
    for index, column in enumerate(found.columns):
        title = _title(column, narrow=short)
        if index == 0:
            table.add_column(title, overflow="fold", vertical="bottom")
        else:
            table.add_column(title, justify="right", no_wrap=True)
    for row in found.rows:
        name, *figures = row
        label = cut(name.text) if cut_names else name.text
        table.add_row(Text(label), *(_marked(figure, short=short) for figure in figures))
    return table


def cut(label: str) -> str:
    """A name on several lines, cut where an option begins."""
    return re.sub(r"([:,])", r"\1\n", label)


def _title(column: Column, *, narrow: bool) -> Text:
    words = column.short if narrow else column.title
    return Text(f"{words}\n{column.unit}" if column.unit else words)


def _marked(figure: Figure, *, short: bool) -> Text:
    marks = "".join(
        mark
        for mark, marked in zip("~*!", (figure.ties, figure.best, figure.drifts), strict=True)
        if marked
    )
    wrong = figure.drifts or figure.failed
    style = "bold green" if figure.best else "bold red" if wrong else ""
    # Of what failed there are words, and words may stand below each other.
    words = "\n".join(figure.text.rsplit(" ", 1)) if short and figure.failed else figure.text
    return Text(words + marks, style=style)


def _legend(found: Rows) -> Iterable[Text]:
    figures = [figure for column in found.columns for figure in column.figures]
    for mark, meaning in _LEGEND.items():
        if any(getattr(figure, mark) for figure in figures):
            yield Text(meaning, style="dim")


def _emphasized(figure: Figure, *, code: bool) -> str:
    if code:
        return f"`{_flat(figure.text)}`"
    if figure.drifts and figure.text != "drifts":
        return f"{figure.text} **drifts**"
    if figure.drifts or figure.failed:
        return f"**{figure.text}**"
    marked = f"**{figure.text}**" if figure.best else figure.text
    return f"{marked} ~" if figure.ties else marked


def _failures(found: Rows) -> list[str]:
    return [f"{one.name}, {one.status}: {one.reason}" for one in found.failures]


def _list(title: str, lines: Iterable[str], style: str = "") -> Iterable[Text]:
    lines = list(lines)
    if lines:
        yield Text(f"\n{title}", style=f"bold {style}".strip())
    for line in lines:
        yield Text(f"  {line}")


def _flat(written: str) -> str:
    """One line of Markdown that ends no cell of a table."""
    return " ".join(written.split()).replace("|", r"\|")
