"""Scopes: where the names of a file are bound, by Python's rules.

LibCST's own provider also tells where each name is used, which takes three quarters of the time of
a migration and is not needed here.
"""

from __future__ import annotations

import builtins
from dataclasses import dataclass, field
from typing import Literal

import libcst as cst

from unipar.migrate.tree import children

_COMPREHENSIONS = (cst.ListComp, cst.SetComp, cst.DictComp, cst.GeneratorExp)
_OF_FUNCTION = (cst.Parameters, cst.TypeParameters)
# Most nodes are of these, and bind nothing.
_PLAIN = {
    cst.Name, cst.Call, cst.Expr, cst.SimpleStatementLine, cst.IndentedBlock, cst.Assign,
    cst.BinaryOperation, cst.Integer, cst.SimpleString, cst.Index, cst.Subscript,
    cst.SubscriptElement, cst.Tuple, cst.Element, cst.If, cst.Comparison, cst.ComparisonTarget,
}  # fmt: skip
_BUILTIN = frozenset(dir(builtins))


@dataclass(frozen=True, eq=False)
class Binding:
    """A place that gives a name its meaning.

    Attributes:
        scope: whose name it is; ``None`` for one that is built in.
        node: what binds it.
        imported: what an import binds it to: ``torch.optim``, ``.models.Net``.
    """

    scope: Scope | None
    node: cst.CSTNode | None
    imported: str = ""


@dataclass(eq=False)
class Scope:
    """A module, function, class or comprehension.

    Attributes:
        parent: the one around it.
        kind: which of these it is.
        bindings: of its own names.
        elsewhere: names that are declared global or nonlocal.
    """

    parent: Scope | None
    kind: Literal["module", "function", "class", "comprehension"]
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    elsewhere: dict[str, Literal["global", "nonlocal"]] = field(default_factory=dict)

    def __getitem__(self, name: str) -> list[Binding]:
        """The bindings that a name has here."""
        scope: Scope | None = self.owner(name)
        first = True
        while scope is not None:
            if name in scope.bindings and (first or scope.kind != "class"):
                return scope.bindings[name]
            scope, first = scope.parent, False
        return [Binding(None, None)] if name in _BUILTIN else []

    def owner(self, name: str) -> Scope:
        """The scope that a binding of a name made here belongs to."""
        where = self.elsewhere.get(name)
        scope = self
        if where is None or scope.parent is None:
            return scope
        if where == "global":
            while scope.parent is not None:
                scope = scope.parent
            return scope
        around = [scope.parent]
        while around[-1].parent is not None:
            around.append(around[-1].parent)
        functions = [one for one in around if one.kind == "function"]
        bound = [one for one in functions if name in one.bindings]
        return next(iter(bound or functions), scope)

    def bind(self, name: str, node: cst.CSTNode, imported: str = "") -> None:
        owner = self.owner(name)
        owner.bindings.setdefault(name, []).append(Binding(owner, node, imported))


def scoped_children(
    node: cst.CSTNode, scope: Scope | None
) -> list[tuple[cst.CSTNode, Scope | None]]:
    """List a node's children, each with the scope that it is in; bind the names that it binds.

    Names of attributes and keywords are in none, for they are looked up elsewhere.
    """
    parts = children(node)
    if scope is None or type(node) in _PLAIN:
        return [(one, scope) for one in parts]
    if isinstance(node, (cst.Attribute, cst.Arg)):
        return [(one, scope if one is node.value else None) for one in parts]
    if isinstance(node, (cst.Import, cst.ImportFrom)):
        _import(node, scope)
        return [(one, None) for one in parts]
    if isinstance(node, (cst.FunctionDef, cst.Lambda, cst.ClassDef)):
        if not isinstance(node, cst.Lambda):
            scope.bind(node.name.value, node)
        inner = Scope(scope, "class" if isinstance(node, cst.ClassDef) else "function")
        return [
            (one, inner if one is node.body or isinstance(one, _OF_FUNCTION) else scope)
            for one in parts
        ]
    if isinstance(node, cst.Param):  # A default is computed around the function.
        scope.bind(node.name.value, node)
        return [(one, scope if one is node.name else scope.parent) for one in parts]
    if isinstance(node, _COMPREHENSIONS):
        inner = Scope(scope, "comprehension")
        return [(one, inner) for one in parts]
    if isinstance(node, cst.CompFor):  # What the first loop goes over is computed around it.
        around = scope if scope.bindings else scope.parent
        _bind_target(node.target, scope)
        return [(one, around if one is node.iter else scope) for one in parts]
    _bind(node, scope)
    return [(one, scope) for one in parts]


def _bind(node: cst.CSTNode, scope: Scope) -> None:
    """Bind the names that a statement, or a part of one, binds."""
    if isinstance(node, (cst.AssignTarget, cst.AnnAssign, cst.AugAssign, cst.For)):
        _bind_target(node.target, scope)
    elif isinstance(node, cst.NamedExpr):
        around = scope
        while around.kind == "comprehension" and around.parent is not None:
            around = around.parent
        _bind_target(node.target, around)
    elif isinstance(node, (cst.AsName, cst.MatchAs, cst.MatchStar)) and node.name is not None:
        _bind_target(node.name, scope)
    elif isinstance(node, cst.MatchMapping) and node.rest is not None:
        _bind_target(node.rest, scope)
    elif isinstance(node, (cst.TypeVar, cst.TypeVarTuple, cst.ParamSpec, cst.TypeAlias)):
        scope.bind(node.name.value, node)
    elif isinstance(node, (cst.Global, cst.Nonlocal)):
        where = "global" if isinstance(node, cst.Global) else "nonlocal"
        scope.elsewhere |= {one.name.value: where for one in node.names}


def _bind_target(target: cst.CSTNode, scope: Scope) -> None:
    if isinstance(target, cst.Name):
        scope.bind(target.value, target)
    elif isinstance(target, (cst.Tuple, cst.List)):
        for element in target.elements:
            _bind_target(element.value, scope)


def _import(node: cst.Import | cst.ImportFrom, scope: Scope) -> None:
    if isinstance(node.names, cst.ImportStar):
        return
    module = ""
    if isinstance(node, cst.ImportFrom):
        module = "." * len(node.relative) + (dotted(node.module) if node.module else "")
    for alias in node.names:
        name = dotted(alias.name)
        given = alias.asname.name if alias.asname is not None else None
        if isinstance(node, cst.ImportFrom):
            whole = f"{module}{name}" if module.endswith(".") or not module else f"{module}.{name}"
        else:
            whole = name if given is not None else name.partition(".")[0]
        bound = given.value if isinstance(given, cst.Name) else name.partition(".")[0]
        scope.bind(bound, node, whole)


def dotted(node: cst.CSTNode) -> str:
    """``a.b.c`` as text."""
    if isinstance(node, cst.Attribute):
        return f"{dotted(node.value)}.{node.attr.value}"
    return node.value if isinstance(node, cst.Name) else ""
