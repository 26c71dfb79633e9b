"""Possible values of names, followed through assignments, functions and classes.

The order of statements is not looked at, so a set is what a name may hold anywhere in its scope.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import libcst as cst

from unipar.migrate.expressions import FABRIC, NOTHING, Expressions, Origin, Values
from unipar.migrate.literals import argument, constant
from unipar.migrate.source import Source


class Flow(Expressions):
    """The values of all expressions of a program, grown until they stay.

    Args:
        sources: its files, by the names of their modules.
    """

    def __init__(self, sources: Mapping[str, Source]) -> None:
        super().__init__(sources)
        rules = [rule for source in sources.values() for rule in self._rules(source)]
        for _ in range(30):
            self._grown = False
            for rule in rules:
                self._apply(*rule)
            if not self._grown:
                break
        self._known = {}

    def instantiate(self, node: cst.BaseExpression) -> None:
        """Let ``self`` of a method also stand for the calls that make instances of its class."""
        own = {id(one.node) for one in self.values(node) if one.kind == "self"}
        scope = self.source(node).scope(node) if isinstance(node, cst.Name) else None
        if not own or scope is None or not isinstance(node, cst.Name):
            return
        made = [
            key[1] for key, classes in self._env.items()
            if key[0] == "class of" and any(self._is_a(id(one.node), own, set()) for one in classes)
        ]  # fmt: skip
        for one in scope[node.value]:
            self._grow(("name", id(one.scope), node.value), frozenset(made))
        self._known = {}

    def _is_a(self, class_: int, wanted: set[int], seen: set[int]) -> bool:
        bases = self._env.get(("bases", class_), NOTHING) if class_ not in seen else NOTHING
        return class_ in wanted or any(
            self._is_a(id(one.node), wanted, seen | {class_}) for one in bases
        )

    def _rules(self, source: Source) -> Iterable[tuple[Any, cst.CSTNode, Any]]:
        """(what to do, node, with what) for each statement that moves values."""
        for node in source.nodes:
            if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
                self._define(source, node)
            if isinstance(node, cst.ClassDef):
                yield "bases", node, None
            elif isinstance(node, cst.FunctionDef):
                yield "defaults", node, None
            elif isinstance(node, cst.Assign):
                for target in node.targets:
                    yield "assign", target.target, node.value
            elif isinstance(node, (cst.AnnAssign, cst.NamedExpr)) and node.value is not None:
                yield "assign", node.target, node.value
            elif isinstance(node, cst.WithItem) and node.asname is not None:
                yield "assign", node.asname.name, node.item
            elif isinstance(node, cst.For):
                yield "each", node.target, node.iter
            elif isinstance(node, cst.Return) and node.value is not None:
                function = source.function(node)
                yield "return", function, node.value
            elif isinstance(node, cst.Call):
                yield "call", node, None

    def _define(self, source: Source, node: cst.FunctionDef | cst.ClassDef) -> None:
        kind = "function" if isinstance(node, cst.FunctionDef) else "class"
        origin = frozenset({self._origin(kind, node)})
        class_ = source.class_(node)
        if class_ is not None:
            self._grow(("field", id(class_), node.name.value), origin)
            if isinstance(node, cst.FunctionDef) and not _is_unbound(node):
                first = next(iter(_parameters(node)), None)
                if first is not None:
                    key = ("parameter", id(node), first)
                    self._grow(key, frozenset({self._origin("self", class_)}))
                    self._bind_parameter(source, node, first, key)
        scope = source.scope(node)
        if scope is not None:
            self._grow(("name", id(scope), node.name.value), origin)

    def _bind_parameter(
        self, source: Source, function: cst.FunctionDef, name: str, key: Any
    ) -> None:
        scope = source.scope(function.body)
        if scope is None:
            scope = next((source.scope(n) for n in _params_nodes(function)), None)
        if scope is not None:
            self._grow(("name", id(scope), name), self._env.get(key, NOTHING))

    def _apply(self, what: str, node: cst.CSTNode, value: Any) -> None:
        if what == "assign":
            self._assign(node, value)
        elif what == "each":
            # What a loop goes over is only followed to the loaders, which the loop's own node has.
            self.values(value)
        elif what == "return":
            self._grow(("return", id(node)), self.values(value))
        elif what == "bases" and isinstance(node, cst.ClassDef):
            for base in node.bases:
                self._grow(("bases", id(node)), self.values(base.value))
        elif what == "defaults" and isinstance(node, cst.FunctionDef):
            self._bind(node, _defaults(node), 0)
        elif what == "call" and isinstance(node, cst.Call):
            self._pass_arguments(node)

    def _assign(self, target: cst.CSTNode, value: cst.CSTNode) -> None:
        if isinstance(target, (cst.Tuple, cst.List)):
            for index, element in enumerate(target.elements):
                found: Values = NOTHING
                for one in self.values(value):
                    found |= self._env.get(("field", self._owner(one), index), NOTHING)
                self._store(element.value, found)
        else:
            self._store(target, self.values(value))

    def _store(self, target: cst.CSTNode, values: Values) -> None:
        if isinstance(target, cst.Name):
            scope = self.source(target).scope(target)
            if scope is None:
                return
            for one in scope[target.value]:
                if not one.imported and one.scope is not None:
                    self._grow(("name", id(one.scope), target.value), values)
        elif isinstance(target, cst.Attribute):
            for one in self.values(target.value):
                if one.kind != "external":
                    self._grow(("field", self._owner(one), target.attr.value), values)
        elif isinstance(target, cst.Subscript) and len(target.slice) == 1:
            index = target.slice[0].slice
            key = constant(index.value) if isinstance(index, cst.Index) else None
            if isinstance(key, (str, int)):
                for one in self.values(target.value):
                    self._grow(("field", self._owner(one), key), values)

    def _pass_arguments(self, call: cst.Call) -> None:
        arguments = list(call.args)
        called = self.values(call.func)
        names = {one.name for one in called if one.kind == "external"}
        if names & {"torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"}:
            self._spawned(call)
            return
        func = call.func
        if isinstance(func, cst.Attribute) and func.attr.value == "launch" and any(
            one.name in FABRIC for one in self.values(func.value)
        ):  # fmt: skip
            self._launched(call, func.value)
            return
        for one in called:
            function, skip = self._run_by(one), int(one.kind == "class")
            if one.kind == "function" and function is not None:
                static = any("static" in str(d.decorator) for d in function.decorators)
                bound = isinstance(call.func, cst.Attribute) and not static
                skip = int(bound and self.source(function).class_(function) is not None)
            if function is not None:
                self._bind(function, arguments, skip)

    def runs(self, call: cst.Call, function: cst.FunctionDef) -> bool:
        """Return whether a call may be of a function, or of a class whose ``__init__`` it is."""
        return any(self._run_by(one) is function for one in self.values(call.func))

    def _run_by(self, called: Origin) -> cst.FunctionDef | None:
        """The function that calling a function or a class runs."""
        node = called.node if called.kind == "function" else None
        if called.kind == "class":
            made = self._inherited(id(called.node), "__init__", set())
            node = next((one.node for one in made), None)
        return node if isinstance(node, cst.FunctionDef) else None

    def _spawned(self, call: cst.Call) -> None:
        target, args = argument(call, 0, "fn"), argument(call, 1, "args")
        given = args.elements if isinstance(args, cst.Tuple) else ()
        for function in self.functions(target) if target is not None else ():
            names = _parameters(function)
            if names:
                rank = frozenset({Origin("external", None, "unipar:local_rank")})
                self._grow(("parameter", id(function), names[0]), rank)
                self._bind_parameter(
                    self.source(function), function, names[0],
                    ("parameter", id(function), names[0]),
                )  # fmt: skip
            self._bind(function, [cst.Arg(one.value) for one in given], 1)

    def _launched(self, call: cst.Call, fabric: cst.BaseExpression) -> None:
        """``fabric.launch(main, x)`` calls ``main(fabric, x)``."""
        target = argument(call, 0, "function")
        for function in self.functions(target) if target is not None else ():
            self._bind(function, [cst.Arg(fabric), *call.args[1:]], 0)

    def _bind(self, function: cst.FunctionDef, arguments: list[cst.Arg], skip: int) -> None:
        names = _parameters(function)
        for index, one in enumerate(arguments):
            name = one.keyword.value if one.keyword is not None else None
            if name is None and not one.star and index + skip < len(names):
                name = names[index + skip]
            if name is not None and name in names:
                key = ("parameter", id(function), name)
                self._grow(key, self.values(one.value))
                self._bind_parameter(self.source(function), function, name, key)


def _is_unbound(function: cst.FunctionDef) -> bool:
    """Return whether a function in a class is given no instance."""
    named = (one.decorator for one in function.decorators)
    return any(isinstance(one, cst.Name) and one.value in ("staticmethod", "classmethod")
               for one in named)  # fmt: skip


def _parameters(function: cst.FunctionDef) -> list[str]:
    params = function.params
    every = [*params.posonly_params, *params.params, *params.kwonly_params]
    return [one.name.value for one in every]


def _defaults(function: cst.FunctionDef) -> list[cst.Arg]:
    """What parameters hold that nobody gives anything, unless that is a plain value."""
    params = function.params
    every = [*params.posonly_params, *params.params, *params.kwonly_params]
    return [
        cst.Arg(one.default, keyword=one.name) for one in every
        if isinstance(one.default, (cst.Call, cst.Attribute))
    ]  # fmt: skip


def _params_nodes(function: cst.FunctionDef) -> Iterable[cst.CSTNode]:
    params = function.params
    return [one.name for one in (*params.posonly_params, *params.params, *params.kwonly_params)]
