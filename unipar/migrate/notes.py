"""The result of a migration: the code, the run's settings, and notes on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["refused", "changed"]


@dataclass(frozen=True, order=True)
class Note:
    """Something of the script that its author should know.

    Attributes:
        file: the file's name.
        line: where in the original, from 1.
        kind: ``refused`` keeps the script from being migrated; ``changed`` works otherwise than it
            did.
        construct: the piece of code, shortened.
        why: why it is refused, or what is otherwise.
        todo: what to do.
        cell: of a notebook, from 1; the line is one of the cell then.
    """

    file: str
    line: int
    kind: Kind
    construct: str
    why: str
    todo: str
    cell: int = 0

    @property
    def place(self) -> str:
        """Where it is, as messages say it."""
        if self.cell:
            return f"{self.file}, cell {self.cell}, line {self.line}"
        return f"{self.file}:{self.line}"

    def __str__(self) -> str:
        return f"{self.place}: {self.kind}: {self.construct}: {self.why} {self.todo}".rstrip()


@dataclass(frozen=True)
class Migration:
    """One file, migrated or left alone.

    Attributes:
        code: the rewritten file; the file itself where nothing is to be migrated, or where
            something is refused.
        config: what goes into ``unipar.yaml``; empty where nothing was migrated.
        notes: in the order of their lines.
        dialect: what the script was written for; empty where there is nothing to migrate.
        changed: whether ``code`` is other than what was given.
        launcher: what starts it: a name among :data:`unipar.migrate.launchers.LAUNCHERS`.
        launched: variables that the launcher of the script as it was sets.
    """

    code: str
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    dialect: str = ""
    changed: bool = False
    launcher: str = "python"
    launched: Mapping[str, str] = field(default_factory=dict)

    @property
    def refused(self) -> bool:
        """Whether something keeps the script from being migrated."""
        return any(note.kind == "refused" for note in self.notes)
