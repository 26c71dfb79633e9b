"""A table that fits a terminal without breaking a word: cells wrap, then columns are left out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_SPACES = r"(?<=\s)"
OPTIONS = r"(?<=[:,\s])"
"""Where a strategy such as ``fsdp:sharding=hybrid,cpu_offload=true`` may be broken."""
NOWHERE = r"(?!)"
"""For names that are searched for and copied."""


@dataclass
class _Column:
    title: str
    rank: int
    right: bool
    breaks: str
    cells: list[Text] = field(default_factory=list)
    width: int = 0

    def pieces(self, text: str) -> list[list[str]]:
        """What stays together, of each line."""
        return [re.split(self.breaks, line) for line in text.split("\n")]

    @property
    def texts(self) -> list[str]:
        return [self.title, *(cell.plain for cell in self.cells)]

    @property
    def widest(self) -> int:
        """The width in which nothing wraps."""
        return max(cell_len(line) for text in self.texts for line in text.split("\n"))

    @property
    def narrowest(self) -> int:
        """The width below which a word would be broken."""
        return max(
            cell_len(piece.rstrip())
            for text in self.texts
            for pieces in self.pieces(text)
            for piece in pieces
        )

    def wrapped(self, text: str) -> str:
        """The text in lines of at most ``width``, each as full as can be."""
        lines = []
        for pieces in self.pieces(text):
            lines.append("")
            for piece in pieces:
                if lines[-1] and cell_len(lines[-1] + piece.rstrip()) > self.width:
                    lines.append("")
                lines[-1] += piece
        return "\n".join(line.rstrip() for line in lines)


class FittedTable:
    """A table for rich that shows as much as there is room for, the names of its rows first.

    Where it is too wide, cells wrap between words, those of the highest rank first. Where that is
    not enough, columns move together, and then that of the highest rank is left out, which a line
    below the table says. Columns of rank 0 are always there.

    Args:
        title: above it.
        elsewhere: what shows the columns that are left out, as in "`unipar runs --json` has them".
    """

    def __init__(self, title: str | None = None, *, elsewhere: str) -> None:
        self._title, self._elsewhere = title, elsewhere
        self._columns: list[_Column] = []

    def add_column(
        self, title: str, rank: int, *, right: bool = False, breaks: str = _SPACES
    ) -> None:
        """Add a column.

        Args:
            title: its head.
            rank: of two, the higher wraps first, and is left out first; 0 never is.
            right: whether numbers are in it.
            breaks: a regular expression of the places where a cell may be broken.
        """
        self._columns.append(_Column(title, rank, right, breaks))

    def add_row(self, *cells: str | Text) -> None:
        """Add a row, with a cell for each column."""
        for column, cell in zip(self._columns, cells, strict=True):
            column.cells.append(cell if isinstance(cell, Text) else Text(cell))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The table, and below it what there was no room for."""
        left, hidden, tight = list(self._columns), [], False
        endless = options.update(width=10 * options.max_width + 1000)

        def excess() -> int:
            table = self._table(left, tight)
            return Measurement.get(console, endless, table).maximum - options.max_width

        while True:
            for column in left:
                column.width = column.widest
            for column in sorted(left, key=lambda one: one.rank, reverse=True):
                if (over := excess()) > 0:
                    column.width = max(column.narrowest, column.widest - over)
            least = max(left, key=lambda one: one.rank)
            if excess() <= 0 or (tight and not least.rank):
                break
            if tight:
                left.remove(least)
                hidden.insert(0, " ".join(least.title.split()))
            tight = True
        yield self._table(left, tight)
        if hidden:
            names = ", ".join(hidden[:-1]) + " and " * (len(hidden) > 1) + hidden[-1]
            yield Text(f"There is no room here for {names}: {self._elsewhere}.", style="dim")

    def _table(self, columns: list[_Column], tight: bool) -> Table:
        made = Table(
            title=self._title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE,
            padding=(0, 0) if tight else (0, 1),
            collapse_padding=True,
            pad_edge=False,
        )
        for column in columns:
            title = Text(column.wrapped(column.title))
            # Only what alone is too wide for the terminal is ever folded.
            made.add_column(title, justify="right" if column.right else "left", overflow="fold")
        for cells in zip(*(column.cells for column in columns), strict=True):
            made.add_row(
                *(
                    Text(column.wrapped(cell.plain), cell.style)
                    for column, cell in zip(columns, cells, strict=True)
                )
            )
        return made
