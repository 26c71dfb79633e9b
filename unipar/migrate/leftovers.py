"""Leftovers of a framework in a program that its dialect has rewritten."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.edits import Span
from unipar.migrate.imports import imported
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source


class Leftovers:
    """Names of a framework that no edit has dealt with, and its imports.

    Args:
        plan: the program.
        package: the framework's top package.
    """

    def __init__(self, plan: Plan, package: str) -> None:
        self._plan, self._package = plan, package
        self._done: dict[str, list[Span]] = {}

    def settle(self, node: cst.CSTNode) -> None:
        """Note that an edit deals with all that stands in a node."""
        source = self._plan.flow.source(node)
        self._done.setdefault(source.name, []).append(source.span(node))

    def refuse_without(self, what: str, *names: str) -> bool:
        """Refuse the framework's first import where no call of these is seen.

        Returns:
            Whether that is so.
        """
        if self._plan.calls(*names):
            return False
        for source in self._plan.sources:
            for node in (*source.all(cst.Import), *source.all(cst.ImportFrom)):
                if any(map(self._owns, imported(node))):
                    todo = "Give migrate the file that calls it too."
                    self._plan.refuse(node, f"no {what} is seen.", todo)
                    return True
        return True

    def refuse_below(self, name: str, why: str, todo: str) -> None:
        """Refuse a name of the framework, or with a dot at its end all below it."""
        for source in self._plan.sources:
            for node in (*source.all(cst.Attribute), *source.all(cst.Name)):
                names = self._plan.flow.names(node)
                if self._is_use(source, node) and any(
                    f"{one}.".startswith(f"{name.rstrip('.')}.") for one in names
                ):
                    self._plan.refuse(node, why, todo)
                    self.settle(node)

    def refuse(self, why: str, todo: str) -> None:
        """Refuse every use of the framework that is not settled."""
        for source in self._plan.sources:
            done = self._done.get(source.name, [])
            for node in source.nodes:
                if not isinstance(node, (cst.Name, cst.Attribute)) or not self._is_use(
                    source, node
                ):
                    continue
                chain: list[cst.BaseExpression] = [node]
                while isinstance(chain[-1], cst.Attribute):
                    chain.append(chain[-1].value)
                spans = [source.span(one) for one in chain]
                if not any(a <= begin and end <= b for a, b in done for begin, end in spans):
                    self._plan.refuse(node, why, todo)

    def remove_imports(self) -> None:
        """Take out the framework's imports."""
        for source in self._plan.sources:
            for node in source.all(cst.ImportFrom):
                if any(map(self._owns, imported(node))):
                    source.remove(node)
            for node in source.all(cst.Import):
                kept = [one for one in node.names if not self._owns(one.evaluated_name)]
                if not kept:
                    source.remove(node)
                elif len(kept) < len(node.names):
                    names = ", ".join(source.code(one).rstrip(" ,") for one in kept)
                    source.edits.replace(source.span(node), f"import {names}")

    def _is_use(self, source: Source, node: cst.Name | cst.Attribute) -> bool:
        parent = source.parent(node)
        if isinstance(parent, (cst.ImportAlias, cst.ImportFrom, cst.AsName, cst.AssignTarget)):
            return False
        if isinstance(parent, cst.Attribute):  # The whole chain is one use.
            return False
        return any(map(self._owns, self._plan.flow.names(node)))

    def _owns(self, name: str) -> bool:
        return f"{name}.".startswith(f"{self._package}.")
