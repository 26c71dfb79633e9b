"""The plan of a migration: edits, notes and settings decided so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import libcst as cst

from unipar.migrate.edits import Span
from unipar.migrate.expressions import Origin, Values
from unipar.migrate.flow import Flow
from unipar.migrate.notes import Kind, Note
from unipar.migrate.source import Source

_SHOWN = 70


class Plan:
    """The decisions over one program.

    Attributes:
        flow: the program.
        settings: the text of the JSON and YAML files beside it, by their paths.
        config: what goes into ``unipar.yaml``.
        notes: what there is to say.
        models: origins of the modules that some optimizer updates.
        launcher: what starts the script: a name among ``unipar.migrate.launchers.LAUNCHERS``.
        launched: variables that the launcher of the script as it is sets, by what is beside it.
    """

    def __init__(
        self, sources: Mapping[str, Source], settings: Mapping[str, str] | None = None
    ) -> None:
        self.sources = list(sources.values())
        self.settings = settings or {}
        self.flow = Flow(sources)
        self.config: dict[str, Any] = {}
        self.notes: list[Note] = []
        self.models: set[Origin] = set()
        self.launcher = "python"
        self.launched: dict[str, str] = {}

    # -- looking ---------------------------------------------------------------------------------

    def calls(self, *names: str) -> list[tuple[Source, cst.Call]]:
        """Every call of a function of another package, by any of its names."""
        wanted = set(names)
        return [
            (source, call)
            for source in self.sources
            for call in source.all(cst.Call)
            if wanted & self.flow.names(call.func)
        ]

    def methods(self, *names: str) -> list[tuple[Source, cst.Call, cst.Attribute]]:
        """Every call of a method by its name, whatever it is called on."""
        return [
            (source, call, call.func)
            for source in self.sources
            for call in source.all(cst.Call)
            if isinstance(call.func, cst.Attribute) and call.func.attr.value in names
        ]

    def made_by(self, values: Values, *names: str) -> bool:
        """Return whether some of the values come from calls of these."""
        return any(one.kind == "call" and one.name in names for one in values)

    # -- deciding --------------------------------------------------------------------------------

    def replace(self, node: cst.CSTNode, *parts: str | cst.CSTNode) -> None:
        """Put text, and parts of it, in place of a node."""
        source = self.flow.source(node)
        spans: list[str | Span] = [
            one if isinstance(one, str) else source.span(one) for one in parts
        ]
        source.edits.replace(source.span(node), *spans)

    def refuse(self, node: cst.CSTNode, why: str, todo: str) -> None:
        """Note what keeps the program from being migrated."""
        self._note("refused", node, why, todo)

    def refuse_where_reached(self, node: cst.CSTNode, why: str, todo: str) -> None:
        """Note what the face refuses, too: in a branch, no run may come to it."""
        if _in_branch(self.flow.source(node), node):
            self.tell(node, f"{why} A run that comes to this line ends there.", todo)
        else:
            self.refuse(node, why, todo)

    def tell(self, node: cst.CSTNode, why: str, todo: str = "") -> None:
        """Note what works otherwise than it did."""
        self._note("changed", node, why, todo)

    def set(self, node: cst.CSTNode, key: str, value: Any) -> None:
        """Put a setting into ``unipar.yaml``."""
        if self.config.setdefault(key, value) != value:
            self.refuse(
                node,
                f"asks for {key}={value}, elsewhere the script asks for {self.config[key]}.",
                "A run has one; use the same everywhere.",
            )

    def _note(self, kind: Kind, node: cst.CSTNode, why: str, todo: str) -> None:
        source = self.flow.source(node)
        construct = " ".join(source.code(node).split())
        if len(construct) > _SHOWN:
            construct = construct[: _SHOWN - 1] + "…"
        note = Note(source.name, source.line(node), kind, construct, why, todo)
        if note not in self.notes:
            self.notes.append(note)


def _in_branch(source: Source, node: cst.CSTNode) -> bool:
    """Whether a condition decides if a run comes to a node, other than how the file is started."""
    below = node
    for above in source.around(node):
        # Of one that is the test, the test itself decides nothing.
        test = above.test if isinstance(above, cst.If) else below
        if test is not below and "__name__" not in source.code(test):
            return True
        below = above
    return False
