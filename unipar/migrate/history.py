"""The last assignment to a name before it is read, where that is certain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import libcst as cst

from unipar.migrate.plan import Plan
from unipar.migrate.source import Source
from unipar.migrate.tree import inside


class Write(NamedTuple):
    """An assignment.

    Attributes:
        statement: the whole of it.
        target: the name or attribute.
        value: what it is given, or for ``x /= n`` what it is divided by.
        operator: of an augmented assignment.
    """

    statement: cst.BaseSmallStatement
    target: cst.BaseExpression
    value: cst.BaseExpression
    operator: cst.BaseAugOp | None = None


def writes(source: Source, name: cst.BaseExpression) -> Iterator[Write]:
    """All assignments to a name or attribute, in its function or where the name is bound."""
    text, function = source.code(name), source.function(name)
    scope = source.scope(name) if isinstance(name, cst.Name) else None
    elsewhere = {id(one.node) for one in scope[text]} if scope is not None else set()
    found: list[Write] = []
    for one in source.all(cst.Assign):
        found += [Write(one, target.target, one.value) for target in one.targets]
    for one in source.all(cst.AnnAssign):
        found += [Write(one, one.target, one.value)] if one.value is not None else []
    for one in source.all(cst.AugAssign):
        found.append(Write(one, one.target, one.value, one.operator))
    for one in sorted(found, key=lambda write: source.span(write.statement)):
        near = source.function(one.statement) is function or id(one.target) in elsewhere
        if near and source.code(one.target) == text:
            yield one


def last_write(source: Source, name: cst.BaseExpression) -> Write | None:
    """The assignment that decides what a name holds where it is read.

    ``None`` where that depends on a condition, or on what else is called.
    """
    if not isinstance(name, (cst.Name, cst.Attribute)):
        return None
    every = list(writes(source, name))
    here = [one for one in every if source.function(one.statement) is source.function(name)]
    before = writes_before(source, name)
    if not before:
        return every[0] if len(every) == 1 and not here else None
    last = before[-1]
    return last if _unconditional(source, last.statement, name) else None


def writes_before(source: Source, name: cst.BaseExpression) -> list[Write]:
    """The assignments of its function that may decide what a name holds where it is read.

    Those of later lines, which a loop may come to first, are not among them.
    """
    at, function = source.span(name)[0], source.function(name)
    before = [
        one for one in writes(source, name)
        if source.function(one.statement) is function and source.span(one.statement)[1] <= at
    ]  # fmt: skip
    certain = [at for at, one in enumerate(before) if _unconditional(source, one.statement, name)]
    return before[certain[-1] :] if certain else before


def _unconditional(source: Source, statement: cst.CSTNode, name: cst.CSTNode) -> bool:
    """Return whether a statement has been run whenever a name after it is read."""
    around = set(source.around(name))
    for above in source.around(statement):
        if above in around:
            return True
        if isinstance(above, (cst.If, cst.Else, cst.For, cst.While, cst.Try, cst.Match)):
            return False
    return False


def behind(plan: Plan, node: cst.BaseExpression) -> Iterator[cst.CSTNode]:
    """An expression and all in it, and what its names and attributes may have been given."""
    stack: list[cst.BaseExpression] = [node]
    seen: set[cst.CSTNode] = set()
    while stack:
        for one in inside(stack.pop()):
            yield one
            if not isinstance(one, (cst.Name, cst.Attribute)):
                continue
            source = plan.flow.source(one)
            for write in writes(source, one):
                same = source.function(write.statement) is source.function(one)
                late = same and source.span(write.statement)[1] > source.span(one)[0]
                if late or write.statement in seen:
                    continue
                seen.add(write.statement)
                stack.append(write.value)
                if write.operator is not None:
                    yield write.statement
