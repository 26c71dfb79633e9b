"""What becomes of the names of a framework: one table for its face, its tests and its page."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from opcode import opmap
from types import FrameType
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
        """A module's ``__getattr__``, which refuses names of the table when they are asked for.

        The error is an ImportError for ``from module import name``, and an AttributeError for
        ``module.name``, so that ``hasattr`` and ``getattr`` with a default answer.

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
            why = self.why_not(name)
            # Of an AttributeError `from module import name` would keep no word.
            imports = _imports(inspect.currentframe(), or_looks_for_module=why is not None)
            kind = ImportError if imports else AttributeError
            raise kind(f"{module} has no {name}. {why or NOT_KEPT}")

        return lookup

    def markdown(self, fate: Fate) -> str:
        """The rows of one fate as a table in Markdown."""
        rows = [row for row in self.rows if row.fate == fate]
        reasons = any(row.why for row in rows)
        titles = ["names", "why, and what to do"] if reasons else ["names"]
        head = [f"| {' | '.join(titles)} |", f"| {' | '.join('---' for _ in titles)} |"]
        lines = [f"| {_names(row)} |" + f" {row.why} |" * reasons for row in rows]
        return "\n".join([*head, *lines]) + "\n"


def _imports(called: FrameType | None, *, or_looks_for_module: bool) -> bool:
    """Whether the caller of a frame is at a ``from module import name``.

    Args:
        called: the frame.
        or_looks_for_module: whether it is so, too, where Python asks before it imports a module
            of that name, which it does after an AttributeError alone.
    """
    asking = called.f_back if called is not None else None
    if asking is None:
        return False
    if asking.f_code.co_name == "_handle_fromlist":  # CPython 3.10 to 3.14, importlib._bootstrap.
        return or_looks_for_module
    return asking.f_code.co_code[asking.f_lasti] == opmap["IMPORT_FROM"]


def _names(row: Row) -> str:
    return ", ".join(f"`{name}`" for name in row.names.split())


def lines_of(tables: Iterable[Table], fate: Fate) -> str:
    """The tables, each under its title."""
    return "\n".join(
        f"**{one.title}**\n\n{one.markdown(fate)}"
        for one in tables
        if any(row.fate == fate for row in one.rows)
    )
