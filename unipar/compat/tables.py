"""What becomes of the names of a framework: one table for its face, its tests and its page."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, NoReturn

from unipar.errors import ConfigError

Fate = Literal["kept", "ignored", "refused"]
NOT_KEPT = (
    "It is none of the names that are kept, which are the public ones that scripts use. Use one of "
    "those, or write here what it does."
)
"""Why a name is refused that is in no row, and what to do."""


class Row(NamedTuple):
    """Names that have one fate.

    Attributes:
        names: separated by spaces; ``*`` stands for any letters.
        fate: ``kept``, ``ignored`` (there, without effect on training) or ``refused``.
        why: the reason, and what to do instead.
    """

    names: str
    fate: Fate
    why: str = ""


class Table:
    """Rows, of which the first that has a name counts.

    Args:
        title: what the names are of.
        rows: see :class:`Row`.
    """

    def __init__(self, title: str, *rows: Row) -> None:
        self.title, self.rows = title, rows

    def find(self, name: str) -> Row | None:
        """The row of a name; ``None`` if it is in none."""
        for row in self.rows:
            for one in row.names.split():
                if one == name or ("*" in one and fnmatchcase(name, one)):
                    return row
        return None

    def why_not(self, name: str) -> str | None:
        """Why a name is refused, and what to do; ``None`` for one that is kept or in no row."""
        row = self.find(name)
        return row.why if row is not None and row.fate == "refused" else None

    def refuse(self, name: str, shown: str = "") -> NoReturn:
        """Raise the error of what is refused.

        Args:
            name: in the table.
            shown: what the message calls it.

        Raises:
            ConfigError: always.
        """
        row = self.find(name)
        raise ConfigError(f"{shown or name} has no counterpart here. {row.why if row else ''}")

    def refusing(self, module: str, found: Callable[[str], Any] = lambda _: None) -> Any:
        """A module's ``__getattr__``, which refuses names of the table when they are imported.

        Args:
            module: its name.
            found: gives what is made when it is asked for; ``None`` for anything else.
        """

        def lookup(name: str) -> Any:
            if name.startswith("_") and name.endswith("_"):  # As Python and notebooks ask for.
                raise AttributeError(f"module '{module}' has no attribute '{name}'")
            made = found(name)
            if made is not None:
                return made
            raise ImportError(f"{module} has no {name}. {self.why_not(name) or NOT_KEPT}")

        return lookup

    def markdown(self, fate: Fate) -> str:
        """The rows of one fate as a table in Markdown."""
        rows = [row for row in self.rows if row.fate == fate]
        reasons = any(row.why for row in rows)
        titles = ["names", "why, and what to do"] if reasons else ["names"]
        head = [f"| {' | '.join(titles)} |", f"| {' | '.join('---' for _ in titles)} |"]
        lines = [f"| {_names(row)} |" + f" {row.why} |" * reasons for row in rows]
        return "\n".join([*head, *lines]) + "\n"


def _names(row: Row) -> str:
    return ", ".join(f"`{name}`" for name in row.names.split())


def lines_of(tables: Iterable[Table], fate: Fate) -> str:
    """The tables, each under its title."""
    return "\n".join(
        f"**{one.title}**\n\n{one.markdown(fate)}"
        for one in tables
        if any(row.fate == fate for row in one.rows)
    )
