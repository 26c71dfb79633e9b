"""The means to read the scripts of one framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from unipar.migrate.plan import Plan


class Row(NamedTuple):
    """One line of the table of what maps to what.

    Attributes:
        before: what the script has.
        after: what takes its place.
    """

    before: str
    after: str


class Dialect(ABC):
    """How scripts are written for one framework.

    Attributes:
        name: what ``--from`` calls it.
        title: what messages call it.
        marks: names of which one is used in every such script; a trailing dot takes all below.
        trains: names of calls of which one makes a program train by the framework, likewise.
        engines: what its objects that stand for the model, and compute, are called.
        main: the names of the calls that make the framework's main object.
        together: methods of that object by which all ranks save.
        gathering: those for which strategies that divide the model's weights need all ranks.
        whole: the call that gives or writes weights whole where ``state_dict()`` refuses, because
            strategies have divided them; ``{model}`` in it is what the script has called so.
        whole_state: likewise for an optimizer's state, and ``{optimizer}``; empty where the
            framework asks all ranks for it.
        rows: what maps to what.
        refused: what is refused, and what to do about it.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    marks: ClassVar[tuple[str, ...]]
    trains: ClassVar[tuple[str, ...]]
    engines: ClassVar[tuple[str, ...]] = ()
    main: ClassVar[tuple[str, ...]] = ()
    together: ClassVar[tuple[str, ...]] = ()
    gathering: ClassVar[tuple[str, ...]] = ()
    whole: ClassVar[str] = ""
    whole_state: ClassVar[str] = ""
    rows: ClassVar[tuple[Row, ...]] = ()
    refused: ClassVar[tuple[Row, ...]] = ()

    @abstractmethod
    def rewrite(self, plan: Plan) -> None:
        """Decide on the edits, settings and notes of a program."""

    def marked(self, name: str) -> bool:
        """Return whether a name belongs to the framework."""
        return _is_among(name, self.marks)

    def is_trained_by(self, name: str) -> bool:
        """Return whether a call of this name makes a program train by the framework."""
        return _is_among(name, self.trains)

    def concerns(self, name: str) -> bool:
        """Return whether an import of this name is rewritten."""
        return self.marked(name)

    def table(self) -> str:
        """Return the table of what maps to what, in Markdown."""
        return _table(("before", "after"), self.rows)

    def refused_table(self) -> str:
        """Return the table of what is refused, in Markdown."""
        return _table(("refused", "why, and what to do"), self.refused, code=False)


def _is_among(name: str, marks: tuple[str, ...]) -> bool:
    return any(name == mark or (mark[-1] == "." and name.startswith(mark)) or
               (mark[-1] == "." and name == mark[:-1]) for mark in marks)  # fmt: skip


def _table(head: tuple[str, str], rows: tuple[Row, ...], *, code: bool = True) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "| --- | --- |"]
    for before, after in rows:
        shown = f"`{after}`" if code and "(" in after and ": " not in after else after
        lines.append(f"| `{before}` | {shown} |")
    return "\n".join(lines) + "\n"
