"""Parameter groups that are collected in variables before the optimizer is built.

``groups = [{"params": [p for n, p in model.named_parameters() if ...]}]`` becomes a function, which
is called once the strategy has given the parameters their final form.
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from unipar.migrate.literals import argument
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source
from unipar.migrate.tree import inside

_COLLECTORS = ("parameters", "named_parameters")
_FILLING = ("append", "extend", "add", "update", "insert")


def models_behind(plan: Plan, node: cst.CSTNode) -> list[cst.BaseExpression]:
    """The models whose parameters functions of the program collect in an expression."""
    found: list[cst.BaseExpression] = []
    for call in inside(node):
        if not isinstance(call, cst.Call):
            continue
        for function in plan.flow.functions(call.func):
            names = {
                source_name.value
                for one in inside(function.body)
                if isinstance(one, cst.Attribute) and one.attr.value in _COLLECTORS
                and isinstance(source_name := one.value, cst.Name)
            }  # fmt: skip
            for index, one in enumerate(function.params.params):
                value = argument(call, index, one.name.value)
                if one.name.value in names and value is not None:
                    found.append(value)
    return found


def collected(plan: Plan, source: Source, given: cst.BaseExpression) -> list[cst.Assign]:
    """The assignments that parameters go through on their way to an optimizer's first argument.

    None where such a variable is bound twice, or used for anything else as well.
    """
    found: list[cst.Assign] = []
    function = source.function(given)
    names = [
        one for one in source.all(cst.Name)
        if source.function(one) is function and not _is_keyword(source, one)
    ]  # fmt: skip
    waiting = [given]
    while waiting:
        within = [*inside(waiting.pop())]
        for one in within:
            if not isinstance(one, cst.Name) or _is_keyword(source, one):
                continue
            assign = _binding(names, source, one.value)
            if assign is None or assign in found:
                continue
            if not _holds_parameters(plan, names, source, assign):
                continue
            found.append(assign)
            waiting.append(assign.value)
    allowed = {id(one) for root in (given, *(a.value for a in found)) for one in inside(root)}
    allowed |= {id(a.targets[0].target) for a in found}
    bound = {_name(one) for one in found}
    if any(one.value in bound and id(one) not in allowed for one in names):
        return []
    return found


def sorted_into(source: Source, given: cst.BaseExpression) -> list[cst.BaseExpression]:
    """Find what the variables of an expression are filled from, wherever that stands before it.

    ``for n, p in model.named_parameters(): (decay if p.ndim > 1 else rest).append(p)`` fills both
    lists from what the loop goes over. Optimizers are built over such variables as they are: the
    run knows parameters by their names.
    """
    function, end = source.function(given), source.span(given)[0]
    fills = [
        (target, value) for target, value in _fills(source)
        if source.function(value) is function and source.span(value)[0] < end
    ]  # fmt: skip
    found: list[cst.BaseExpression] = []
    waiting: list[cst.BaseExpression] = [given]
    while waiting:
        wanted = {one.value for one in inside(waiting.pop()) if isinstance(one, cst.Name)}
        for target, value in fills:
            filled = {one.value for one in inside(target) if isinstance(one, cst.Name)}
            if filled & wanted and value not in found:
                found.append(value)
                waiting.append(value)
    return found


def _fills(source: Source) -> Iterator[tuple[cst.CSTNode, cst.BaseExpression]]:
    """Find what something is put into, and what it is."""
    for one in source.all(cst.Assign):
        yield from ((target.target, one.value) for target in one.targets)
    for one in source.all(cst.AugAssign):
        yield one.target, one.value
    for one in (*source.all(cst.For), *source.all(cst.CompFor)):
        yield one.target, one.iter
    for one in source.all(cst.Call):
        if isinstance(one.func, cst.Attribute) and one.func.attr.value in _FILLING:
            yield from ((one.func.value, arg.value) for arg in one.args)


def _binding(names: list[cst.Name], source: Source, name: str) -> cst.Assign | None:
    """The only statement that binds a name, if it does nothing else."""
    targets = [
        source.parent(one) for one in names
        if one.value == name and isinstance(source.parent(one), cst.AssignTarget)
    ]  # fmt: skip
    assign = source.parent(targets[0]) if len(targets) == 1 and targets[0] is not None else None
    if not isinstance(assign, cst.Assign) or len(assign.targets) != 1:
        return None
    bare = isinstance(assign.value, cst.Tuple) and not assign.value.lpar
    return None if bare else assign


def _holds_parameters(
    plan: Plan, names: list[cst.Name], source: Source, assign: cst.Assign
) -> bool:
    """Return whether parameters of a model are among what a statement binds."""
    if models_behind(plan, assign.value):
        return True
    for one in inside(assign.value):
        if isinstance(one, cst.Attribute) and one.attr.value in _COLLECTORS:
            return True
        if isinstance(one, cst.Name) and one.value != _name(assign):
            other = _binding(names, source, one.value)
            earlier = other is not None and source.span(other)[0] < source.span(assign)[0]
            if other is not None and earlier and _holds_parameters(plan, names, source, other):
                return True
    return False


def _is_keyword(source: Source, one: cst.Name) -> bool:
    parent = source.parent(one)
    return (isinstance(parent, cst.Arg) and parent.keyword is one) or (
        isinstance(parent, cst.Attribute) and parent.attr is one
    )


def _name(assign: cst.Assign) -> str:
    target = assign.targets[0].target
    return target.value if isinstance(target, cst.Name) else ""
