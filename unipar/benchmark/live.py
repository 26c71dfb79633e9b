"""The live view of a benchmark in a terminal."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unipar.benchmark.cells import Cell
from unipar.benchmark.time_left import Outlook

_ENDED = ("done", "done before")


class Progress:
    """A line for each cell in a terminal; elsewhere a line for each thing that happens.

    Args:
        repeats: of each cell.
        console: where to.
    """

    def __init__(self, repeats: int, console: Console) -> None:
        self._repeats, self._console = repeats, console
        self._cells: dict[Cell, list[str]] = {}
        self._began = time.monotonic()
        self._outlook = ""
        # Drawn again by itself, so that the clock goes on while a trial is waited for.
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=2)

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def __call__(self, cell: Cell, what: str) -> None:
        """Show what is being done with a cell."""
        self._cells.setdefault(cell, []).append(what)
        if not self._console.is_terminal:
            self._console.print(f"{_name(cell)}: {what}", soft_wrap=True)

    def look_ahead(self, outlook: Outlook) -> None:
        """Show how far it is, and how long the rest takes."""
        if not self._console.is_terminal:
            self._console.print(outlook.words, soft_wrap=True)
        self._outlook = outlook.words

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for cell, told in self._cells.items():
            ended = sum(what in _ENDED for what in told)
            now = told[-1]
            style = {"running": "bold", "done": "green", "done before": "dim"}.get(now, "red")
            dots = "●" * ended + "○" * max(self._repeats - ended, 0)
            table.add_row(_name(cell), dots, Text(now, style))
        seconds = int(time.monotonic() - self._began)
        table.add_row(f"{seconds // 60}:{seconds % 60:02}", "", self._outlook, style="dim")
        return table


def _name(cell: Cell) -> str:
    return f"{cell.label} on {cell.devices}"
