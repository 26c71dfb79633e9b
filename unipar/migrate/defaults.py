"""Values of expressions in a run without command-line arguments."""

from __future__ import annotations

from typing import Any

import libcst as cst

from unipar.migrate.history import last_write
from unipar.migrate.literals import argument, constant
from unipar.migrate.plan import Plan
from unipar.migrate.tracing import is_none, trace

UNSEEN = object()
"""What stands for a value that only a run can tell."""
_DEPTH = 20
_SWITCHES = {"store_true": False, "store_false": True}


def by_default(plan: Plan, node: cst.BaseExpression, depth: int = _DEPTH) -> Any:
    """The value of literals, flags, and comparisons of them; else :data:`UNSEEN`.

    Args:
        plan: the program.
        node: the expression.
        depth: how many names it is followed through.
    """
    if is_none(node) or constant(node) is not None:
        return constant(node)
    if depth == 0:
        return UNSEEN
    if isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Not):
        value = by_default(plan, node.expression, depth - 1)
        return UNSEEN if value is UNSEEN else not value
    if isinstance(node, cst.BooleanOperation):
        return _joined(plan, node, depth)
    if isinstance(node, cst.Comparison):
        return _compared(plan, node, depth)
    if isinstance(node, cst.IfExp):
        test = by_default(plan, node.test, depth - 1)
        branch = node.body if test else node.orelse
        return UNSEEN if test is UNSEEN else by_default(plan, branch, depth - 1)
    if isinstance(node, (cst.Tuple, cst.List, cst.Set)):
        values = [by_default(plan, one.value, depth - 1) for one in node.elements]
        return UNSEEN if UNSEEN in values else values
    if isinstance(node, (cst.Name, cst.Attribute)):
        return _named(plan, node, depth)
    return UNSEEN


def _joined(plan: Plan, node: cst.BooleanOperation, depth: int) -> Any:
    left, right = (by_default(plan, one, depth - 1) for one in (node.left, node.right))
    decides = isinstance(node.operator, cst.Or)
    # `args.amp and torch.cuda.is_available()` is off wherever the flag is.
    for one in (left, right):
        if one is not UNSEEN and bool(one) is decides:
            return decides
    return UNSEEN if UNSEEN in (left, right) else not decides


def _compared(plan: Plan, node: cst.Comparison, depth: int) -> Any:
    if len(node.comparisons) != 1:
        return UNSEEN
    target = node.comparisons[0]
    left = by_default(plan, node.left, depth - 1)
    right = by_default(plan, target.comparator, depth - 1)
    if left is UNSEEN or right is UNSEEN:
        return UNSEEN
    if isinstance(target.operator, (cst.In, cst.NotIn)):
        if not isinstance(right, (list, str)):
            return UNSEEN
        return (left in right) is isinstance(target.operator, cst.In)
    if isinstance(target.operator, (cst.Equal, cst.Is)):
        return left == right
    if isinstance(target.operator, (cst.NotEqual, cst.IsNot)):
        return left != right
    return UNSEEN


def _named(plan: Plan, node: cst.Name | cst.Attribute, depth: int) -> Any:
    source = plan.flow.source(node)
    write = last_write(source, node)
    if write is not None and write.operator is None and write.value is not node:
        return by_default(plan, write.value, depth - 1)
    if isinstance(node, cst.Attribute):
        values = _of_flag(plan, node.attr.value, depth - 1)
    else:
        values = [
            UNSEEN if one is node else by_default(plan, one, depth - 1) for one in trace(plan, node)
        ]
    alike = values and all(one is not UNSEEN and one == values[0] for one in values)
    return values[0] if alike else UNSEEN


def _of_flag(plan: Plan, name: str, depth: int) -> list[Any]:
    """The defaults of the command line's flags of a name, or of fields of classes.

    What ``set_defaults`` says wins over what ``add_argument`` says.
    """
    found: list[Any] = []
    forced: list[Any] = []
    for _, call, func in plan.methods("add_argument", "set_defaults"):
        if func.attr.value == "set_defaults":
            given = argument(call, None, name)
            forced += [] if given is None else [by_default(plan, given, depth)]
            continue
        flags = [constant(one.value) for one in call.args if one.keyword is None]
        names = {str(flag).lstrip("-").replace("-", "_") for flag in flags}
        told = constant(argument(call, None, "dest"))
        if name == told or (told is None and name in names):
            found.append(_of_argument(plan, call, depth))
    return forced or found or _of_field(plan, name, depth)


def _of_argument(plan: Plan, call: cst.Call, depth: int) -> Any:
    given = argument(call, None, "default")
    if given is None:
        return _SWITCHES.get(constant(argument(call, None, "action")))
    value, kind = by_default(plan, given, depth), argument(call, None, "type")
    converted = kind is not None and plan.flow.source(kind).code(kind) != "str"
    return UNSEEN if converted and isinstance(value, str) else value


def _of_field(plan: Plan, name: str, depth: int) -> list[Any]:
    """What classes say of a field of a name, and what calls are seen to give instead."""
    given: list[cst.BaseExpression] = []
    for source in plan.sources:
        for one in source.all(cst.AnnAssign):
            block = source.parent(source.parent(one) or one)
            field = isinstance(source.parent(block or one), cst.ClassDef)
            if field and source.code(one.target) == name and one.value is not None:
                given.append(one.value)
    if given:
        every = (argument(call, None, name) for one in plan.sources for call in one.calls())
        given += [one for one in every if one is not None]
    return [by_default(plan, one, depth) for one in given]
