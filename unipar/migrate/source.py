"""One parsed file: where its nodes stand, what is around them, and what their names mean."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import libcst as cst
from libcst.metadata import ByteSpanPositionProvider

from unipar.migrate.edits import Edits, Span
from unipar.migrate.scopes import Scope, scoped_children

_T = TypeVar("_T", bound=cst.CSTNode)
Function = cst.FunctionDef | cst.Module
Loop = cst.For | cst.While
BLOCKS = (cst.IndentedBlock, cst.SimpleStatementSuite, cst.Module)


class _Spans(ByteSpanPositionProvider):
    """The bytes of all nodes, without LibCST's other walk for visitors that nobody asks for.

    LibCST 1.9.0, metadata/base_provider.py.
    """

    def __init__(self, tree: cst.Module) -> None:
        super().__init__()
        self._gen_impl(tree)
        self.found: Any = self._computed


class Source:
    """A file, and the edits that are made to it.

    Args:
        name: the file's name, as messages give it.
        text: its content.
        module: the name under which other files import it.

    Raises:
        libcst.ParserSyntaxError: it is no Python that LibCST reads.
    """

    def __init__(self, name: str, text: str, module: str) -> None:
        self.name, self.text, self.module = name, text, module
        self.tree = cst.parse_module(text)
        self.edits = Edits(text.encode())
        self._spans = _Spans(self.tree).found
        self._scopes: dict[cst.CSTNode, Scope] = {}
        self._parents: dict[cst.CSTNode, cst.CSTNode] = {}
        self._unwrapped: set[cst.CSTNode | None] = set()
        self._functions: dict[cst.CSTNode, Function] = {}
        self._kinds: dict[type[cst.CSTNode], list[cst.CSTNode]] = {}
        self.nodes = self._walk()

    def all(self, kind: type[_T]) -> Iterator[_T]:
        """Every node of a concrete kind, in the order of the file."""
        return iter(self._kinds.get(kind, ()))  # pyright: ignore[reportReturnType]

    def calls(self) -> Iterator[cst.Call]:
        """Every call, in the order of the file."""
        return self.all(cst.Call)

    def span(self, node: cst.CSTNode) -> Span:
        found = self._spans[node]
        return found.start, found.start + found.length

    def code(self, node: cst.CSTNode) -> str:
        start, stop = self.span(node)
        return self.edits.data[start:stop].decode()

    def line(self, node: cst.CSTNode) -> int:
        return self.edits.data.count(b"\n", 0, self.span(node)[0]) + 1

    def scope(self, node: cst.CSTNode) -> Scope | None:
        """The scope that a name is looked up in; ``None`` where it is one of an attribute's."""
        return self._scopes.get(node)

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        return self._parents.get(node)

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yield the nodes that enclose a node, from inside."""
        above = self.parent(node)
        while above is not None:
            yield above
            above = self.parent(above)

    def function(self, node: cst.CSTNode) -> Function:
        """The innermost function around a node, or the module."""
        on_the_way: list[cst.CSTNode] = []
        while node not in self._functions:
            on_the_way.append(node)
            above = self._parents[node]
            if type(above) in (cst.FunctionDef, cst.Module):
                self._functions[node] = above  # pyright: ignore[reportArgumentType]
                break
            node = above
        found = self._functions[node]
        self._functions |= dict.fromkeys(on_the_way, found)
        return found

    def class_(self, function: cst.CSTNode) -> cst.ClassDef | None:
        """The class that a method belongs to."""
        for above in self.around(function):
            if isinstance(above, (cst.FunctionDef, cst.Lambda)):
                return None
            if isinstance(above, cst.ClassDef):
                return above
        return None

    def returned(self, function: cst.CSTNode) -> list[cst.BaseExpression]:
        """Return what a function gives back, in the order of its lines."""
        return [
            one.value for one in self.all(cst.Return)
            if one.value is not None and self.function(one) is function
        ]  # fmt: skip

    def is_tried(self, node: cst.CSTNode) -> bool:
        """Whether a statement may fail and the program goes on."""
        below = node
        for above in self.around(node):
            if isinstance(above, cst.Try) and below is above.body:
                kinds = [self.code(one.type) if one.type else "" for one in above.handlers]
                return any(not one or "Error" in one or "Exception" in one for one in kinds)
            below = above
        return False

    def loops(self, node: cst.CSTNode) -> list[Loop]:
        """The loops around a node within its function, from inside."""
        found: list[Loop] = []
        for above in self.around(node):
            if isinstance(above, (cst.FunctionDef, cst.Lambda)):
                break
            if isinstance(above, (cst.For, cst.While)):
                found.append(above)
        return found

    def block(self, node: cst.CSTNode) -> cst.CSTNode:
        """The innermost list of statements that a node stands in, ``with`` blocks that go apart."""
        return next(
            n for n in self.around(node)
            if isinstance(n, BLOCKS) and self.parent(n) not in self._unwrapped
        )  # fmt: skip

    def blocks(self, node: cst.CSTNode) -> list[cst.CSTNode]:
        """The lists of statements around a node within its function, from inside."""
        found: list[cst.CSTNode] = []
        for above in self.around(node):
            if isinstance(above, BLOCKS):
                found.append(above)
            if isinstance(above, (cst.FunctionDef, cst.Lambda)):
                break
        return found

    def line_start(self, node: cst.CSTNode) -> int:
        """The first byte of the line on which a node begins."""
        return self.edits.data.rfind(b"\n", 0, self.span(node)[0]) + 1

    def remove(self, small: cst.BaseSmallStatement) -> None:
        """Take out a statement, and its line unless something else is on it."""
        line = self.parent(small)
        start, stop = self.span(small)
        body = getattr(self.parent(line), "body", ()) if line is not None else ()
        alone = isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1
        if not alone or sum(not self._is_removed(one) for one in body) <= 1:
            self.edits.replace((start, stop), "pass")
            return
        begin, end = self._whole_line(small)
        rest = self.edits.data[stop:end]
        if rest.strip():  # A comment stays where it is.
            self.edits.replace((start, stop + len(rest) - len(rest.lstrip())), "")
        else:
            self.edits.replace((begin, end), "")

    def _is_removed(self, line: cst.CSTNode) -> bool:
        if not isinstance(line, cst.SimpleStatementLine):
            return False
        return self.edits.covers(self._whole_line(line))

    def _whole_line(self, line: cst.CSTNode) -> Span:
        end = self.edits.data.find(b"\n", self.span(line)[1])
        return self.line_start(line), len(self.edits.data) if end < 0 else end + 1

    def _walk(self) -> list[cst.CSTNode]:
        """Every node in the order of the file; notes their parents, kinds and scopes."""
        nodes: list[cst.CSTNode] = []
        stack: list[tuple[cst.CSTNode, Scope | None]] = [(self.tree, Scope(None, "module"))]
        while stack:
            one, scope = stack.pop()
            nodes.append(one)
            self._kinds.setdefault(type(one), []).append(one)
            if scope is not None:
                self._scopes[one] = scope
            parts = scoped_children(one, scope)
            for child, _ in parts:
                self._parents[child] = one
            stack += reversed(parts)
        return nodes
