"""The plan of a migration: edits, notes and settings decided so far."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import libcst as cst

from unipar.migrate.edits import Span
from unipar.migrate.expressions import Origin, Values
from unipar.migrate.flow import Flow
from unipar.migrate.notes import Kind, Note
from unipar.migrate.source import Source

_SHOWN = 70
_FROM = "from unipar.migrated import "
_MODULES = ("script",)
"""What edits may call, which the file then imports."""


class Clip(NamedTuple):
    """Clipping by norm, in the words of a framework.

    Attributes:
        norm: the norm that is clipped to; ``None`` where it is not given.
        kind: which norm that is; ``None`` for the 2-norm.
        model: whose gradients are clipped, all of them together; ``None`` where that is not seen.
    """

    norm: cst.BaseExpression | None
    kind: cst.BaseExpression | None
    model: cst.BaseExpression | None


class Words(NamedTuple):
    """Names that the rewritten loop calls, for frameworks whose loops follow rules of their own.

    Attributes:
        backward: the function of a loss and an optimizer.
        step: what stands before and behind the optimizer.
        engine: the function of a model that gives what computes.
    """

    backward: str = "script.backward"
    step: tuple[str, str] = ("script.engine(", ").step()")
    engine: str = "script.engine"


class Plan:
    """The decisions over one program.

    Attributes:
        flow: the program.
        settings: the text of the JSON and YAML files beside it, by their paths.
        config: what goes into ``unipar.yaml``.
        notes: what there is to say.
        models: origins of the modules that some optimizer updates.
        optimizers: the calls that build optimizers, each with the model that it updates.
        losses: the backward passes that are a framework's (``fabric.backward(loss)``), each with
            its loss.
        clips: the clipping that is a framework's (``model.clip_grad_norm_(1.0)``).
        norms: for optimizers, the code of a norm that a framework's settings clip to.
        understood: names that take part in training, and that the dialect follows; a trailing
            dot takes all below.
        handled: calls that a dialect has dealt with, whatever they are given.
        words: what the rewritten loop calls.
        launcher: what starts the script: a name among ``unipar.migrate.launchers.LAUNCHERS``.
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
        self.optimizers: dict[Origin, cst.BaseExpression] = {}
        self.losses: dict[cst.Call, cst.BaseExpression] = {}
        self.clips: dict[cst.Call, Clip] = {}
        self.norms: dict[Origin, str] = {}
        self.handled: set[cst.Call] = set()
        self.understood: tuple[str, ...] = ()
        self.launcher = "python"
        self.words = Words()
        self._imports: set[tuple[str, str]] = set()

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
        for module in _MODULES:
            if any(isinstance(one, str) and f"{module}." in one for one in parts):
                self.use(source, f"{_FROM}{module}")

    def use(self, source: Source, line: str) -> None:
        """Make sure that a file has an import."""
        self._imports.add((source.name, line))

    def drop(self, call: cst.CSTNode, instead: str = "None") -> None:
        """Take out a call: its line, or, where its value is used, ``instead`` of it."""
        source = self.flow.source(call)
        line = source.statement(call)
        if line is None:
            self.replace(call, instead)
        else:
            source.remove(line)

    def refuse(self, node: cst.CSTNode, why: str, todo: str) -> None:
        """Note what keeps the program from being migrated."""
        self._note("refused", node, why, todo)

    def warn(self, node: cst.CSTNode, why: str, todo: str) -> None:
        """Note, here and in the code, what changes training."""
        self._note("training", node, why, todo)
        self._comment(node, f"{why} {todo}")

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

    def _comment(self, node: cst.CSTNode, text: str) -> None:
        source = self.flow.source(node)
        line: cst.CSTNode = node
        for above in source.around(node):
            if isinstance(above, (cst.SimpleStatementLine, cst.BaseCompoundStatement)):
                line = above
                break
        start = source.line_start(line)
        before = source.edits.data[start : source.span(line)[0]]
        if not before.strip():
            indent = before.decode()
            source.edits.insert(start, f"{indent}# unipar: {text}{source.newline()}")

    # -- finishing -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Add the imports that the edits need."""
        for source in self.sources:
            every = sorted(line for name, line in self._imports if name == source.name)
            own = ", ".join(line.removeprefix(_FROM) for line in every if line.startswith(_FROM))
            lines = [line for line in every if not line.startswith(_FROM)]
            lines += [f"{_FROM}{own}"] if own else []
            if lines:
                end = source.newline()
                source.edits.insert(_import_place(source), "".join(line + end for line in lines))

    def check_names(self) -> None:
        """Refuse files in which ``script`` already means something else."""
        for source in self.sources:
            for name in source.all(cst.Name):
                scope = source.scope(name)
                parent = source.parent(name)
                member = isinstance(parent, (cst.Attribute, cst.Arg)) and name in (
                    getattr(parent, "attr", None), getattr(parent, "keyword", None),
                )  # fmt: skip
                added = f"{_FROM}{name.value}"
                if (source.name, added) in self._imports and scope is not None and not member:
                    self.refuse(
                        name,
                        f"what is added to the file is named `{name.value}` too.",
                        "Rename this one.",
                    )
                    return


def _import_place(source: Source) -> int:
    """The first byte of the line after the imports at the file's top."""
    place, seen = None, False
    body = source.tree.body
    for index, line in enumerate(body):
        small = line.body if isinstance(line, cst.SimpleStatementLine) else ()
        imports = bool(small) and all(isinstance(s, (cst.Import, cst.ImportFrom)) for s in small)
        docstring = index == 0 and bool(small) and isinstance(small[0], cst.Expr)
        if imports or docstring:
            place, seen = line, seen or imports
        elif seen:
            break
    if place is None:
        return source.line_start(body[0]) if body else 0
    stop = source.span(place)[1]
    end = source.edits.data.find(b"\n", stop)
    return len(source.edits.data) if end < 0 else end + 1
