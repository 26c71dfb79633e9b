"""The expressions that a setting may come from, and definitions that are no longer used."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.literals import argument, constant
from unipar.migrate.plan import Plan
from unipar.migrate.scopes import Binding


def trace(plan: Plan, node: cst.BaseExpression) -> list[cst.BaseExpression]:
    """The expressions that a value may come from, through names, parameters and functions.

    One that cannot be followed any further stands for itself.
    """
    found: list[cst.BaseExpression] = []
    seen: set[cst.CSTNode] = set()
    stack: list[cst.BaseExpression] = [node]
    while stack:
        one = stack.pop()
        if one in seen:
            continue
        seen.add(one)
        following = _behind(plan, one)
        stack += following or ()
        if not following:
            found.append(one)
    return found


def keywords(plan: Plan, call: cst.Call) -> dict[str, list[cst.BaseExpression]] | None:
    """The expressions behind each keyword of a call, those of ``**dictionary`` too.

    Returns:
        ``None`` where a dictionary cannot be seen.
    """
    found: dict[str, list[cst.BaseExpression]] = {}
    for one in call.args:
        if one.keyword is not None:
            found.setdefault(one.keyword.value, []).extend(trace(plan, one.value))
        elif one.star == "**":
            for table in trace(plan, one.value):
                entries = _entries(plan, table)
                if entries is None:
                    return None
                for key, values in entries.items():
                    found.setdefault(key, []).extend(values)
    return found


def _behind(plan: Plan, node: cst.BaseExpression) -> list[cst.BaseExpression]:
    if isinstance(node, cst.IfExp):
        return [node.body, node.orelse]
    if isinstance(node, cst.BooleanOperation):
        return [node.left, node.right]
    if isinstance(node, cst.Call):
        functions = plan.flow.functions(node.func)
        return [one for f in functions for one in plan.flow.source(f).returned(f)]
    if isinstance(node, cst.Name):
        found: list[cst.BaseExpression] = []
        for binding in bindings(plan, node):
            values = _bound_to(plan, binding)
            if values is None:
                return []
            found += values
        return found
    return []


def bindings(plan: Plan, node: cst.Name) -> list[Binding]:
    """Find what binds a name, in the file that it is imported from where that is given."""
    source = plan.flow.source(node)
    scope = source.scope(node)
    found: list[Binding] = list(scope[node.value]) if scope is not None else []
    if len(found) == 1 and found[0].imported:
        module, _, name = found[0].imported.rpartition(".")
        level = len(module) - len(module.lstrip("."))
        if level:
            package = source.module.split(".")[:-level]
            module = ".".join([*package, *filter(None, [module.lstrip(".")])])
        other = plan.flow.sources.get(module)
        if other is not None:
            top = other.scope(other.tree)
            return list(top[name]) if top is not None else []
    return found


def _bound_to(plan: Plan, binding: Binding) -> list[cst.BaseExpression] | None:
    node = binding.node
    if isinstance(node, cst.Param):
        return given_to(plan, node)
    if node is None or binding.imported:
        return None
    source = plan.flow.source(node)
    above = source.parent(node)
    if isinstance(above, cst.AssignTarget):
        above = source.parent(above)
    if isinstance(above, (cst.Assign, cst.AnnAssign)) and above.value is not None:
        return [above.value]
    if isinstance(node, cst.AnnAssign) and node.value is not None:
        return [node.value]
    return None


def given_to(plan: Plan, parameter: cst.Param) -> list[cst.BaseExpression] | None:
    """Find what calls give a parameter of a function, and its default."""
    source = plan.flow.source(parameter)
    function = source.function(parameter)
    if not isinstance(function, cst.FunctionDef):
        return None
    if function.name.value == "__init__" and _is_base(plan, source.class_(function)):
        return None  # What super().__init__(...) gives is not followed.
    names = [one.name.value for one in function.params.params]
    name = parameter.name.value
    method = source.class_(function) is not None
    index = names.index(name) - int(method) if name in names else None
    found: list[cst.BaseExpression] = []
    for place in plan.sources:
        for call in place.all(cst.Call):
            if not plan.flow.runs(call, function):
                continue
            if any(one.star for one in call.args):
                return None
            given = argument(call, index, name) or parameter.default
            if given is None:
                return None
            found.append(given)
    return found or None


def _is_base(plan: Plan, class_: cst.ClassDef | None) -> bool:
    """Return whether another class of the program is derived from one."""
    return any(
        any(one.node is class_ for one in plan.flow.values(base.value))
        for source in plan.sources
        for other in source.all(cst.ClassDef)
        for base in other.bases
    )


def _entries(plan: Plan, table: cst.BaseExpression) -> dict[str, list[cst.BaseExpression]] | None:
    """The entries of a dictionary, and those that are put into it later."""
    found: dict[str, list[cst.BaseExpression]] = {}
    if isinstance(table, cst.Call) and "dict" in plan.flow.names(table.func):
        return keywords(plan, table)
    if not isinstance(table, cst.Dict):
        return None
    for element in table.elements:
        key = constant(element.key) if isinstance(element, cst.DictElement) else None
        if not isinstance(key, str):
            return None
        found.setdefault(key, []).extend(trace(plan, element.value))
    origins = plan.flow.values(table)
    for source in plan.sources:
        for assign in source.all(cst.Assign):
            for target in assign.targets:
                inner = target.target
                if isinstance(inner, cst.Subscript) and plan.flow.values(inner.value) & origins:
                    index = inner.slice[0].slice
                    key = constant(index.value) if isinstance(index, cst.Index) else None
                    if not isinstance(key, str):
                        return None
                    later = isinstance(source.parent(source.parent(assign) or assign), cst.Module)
                    decided = not later and any(
                        isinstance(one, cst.If) and "__name__" not in source.code(one.test)
                        for one in source.around(assign)
                    )
                    values = trace(plan, assign.value)
                    found[key] = [*values, cst.Name("None")] if decided else values
    return found
