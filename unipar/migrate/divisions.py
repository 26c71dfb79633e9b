"""Losses that are divided more often than their gradients' mean wants."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import libcst as cst

from unipar.migrate.history import last_write
from unipar.migrate.literals import constant
from unipar.migrate.numerics import is_number_of_ranks
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source

Losses = Iterable[tuple[Source, cst.Call, cst.BaseExpression]]
_KEEPING = ("float", "mean", "to")


class Division(NamedTuple):
    """One division of a loss.

    Attributes:
        place: the quotient, or the statement ``loss /= n``.
        divisor: what it is divided by.
        text: the divisor, through names that only stand for it.
    """

    place: cst.CSTNode
    divisor: cst.BaseExpression
    text: str


def warn_of_divisions(
    plan: Plan, losses: Losses, *, averages_ranks: bool = False, divided_by: str = ""
) -> None:
    """Call out losses that are divided by the number of batches or of ranks too often.

    Args:
        plan: the program.
        losses: backward passes: file, call, and the expression for the loss.
        averages_ranks: whether the framework averages gradients over ranks by itself.
        divided_by: what of the framework divides the loss by the accumulated batches by itself,
            as messages name it: ``accelerator.backward``.
    """
    for source, _, loss in losses:
        seen: dict[str, Division] = {}
        for one in reversed(divisions(plan, source, loss)):  # The first to be done comes last.
            if is_number_of_ranks(plan, one.divisor):
                if averages_ranks:
                    _warn_of_ranks(plan, one)
            elif one.text in seen or (divided_by and _counts_batches(one)):
                first = seen.get(one.text)
                by = f"in line {source.line(first.place)}" if first is not None else divided_by
                _warn_of_batches(plan, one, by, framework=first is None)
            seen.setdefault(one.text, one)


def divisions(plan: Plan, source: Source, loss: cst.BaseExpression) -> list[Division]:
    """The divisions that a loss has gone through for certain, the last first."""
    found: list[Division] = []
    node: cst.BaseExpression | None = loss
    for _ in range(20):
        if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.Divide):
            found.append(Division(node, node.right, _meaning(source, node.right)))
            node = node.left
        elif isinstance(node, (cst.Name, cst.Attribute)):
            write = last_write(source, node)
            if write is None:
                break
            if isinstance(write.operator, cst.DivideAssign):
                text = _meaning(source, write.value)
                found.append(Division(write.statement, write.value, text))
                node = write.target
            else:
                node = write.value if write.operator is None else None
        elif isinstance(node, cst.Call):
            node, source = _called(plan, source, node)
        else:
            break
    return found


def _called(plan: Plan, source: Source, call: cst.Call) -> tuple[cst.BaseExpression | None, Source]:
    """What a call gives back: of a function that has one return, or of a method that keeps it."""
    functions = plan.flow.functions(call.func)
    if len(functions) == 1:
        there = plan.flow.source(functions[0])
        returned = there.returned(functions[0])
        return (returned[0] if len(returned) == 1 else None), there
    if isinstance(call.func, cst.Attribute) and call.func.attr.value in _KEEPING:
        return call.func.value, source
    return None, source


def _meaning(source: Source, divisor: cst.BaseExpression) -> str:
    node = divisor
    for _ in range(5):
        if constant(node) is not None:
            return str(constant(node))
        write = last_write(source, node)
        if write is None or write.operator is not None:
            break
        if not isinstance(write.value, (cst.Name, cst.Attribute, cst.Integer)):
            break
        node = write.value
    return source.code(node)


def _counts_batches(one: Division) -> bool:
    return "accum" in one.text.lower() or isinstance(one.divisor, cst.Integer)


def _warn_of_batches(plan: Plan, one: Division, by: str, *, framework: bool) -> None:
    count = one.text
    plan.warn(
        one.place,
        f"the loss is divided by {count} twice: {'by' if framework else 'here, and'} {by}"
        f"{' too' if framework else ''}. The gradient of a step is 1/{count} of the mean over its "
        f"batches: SGD's steps are {count} times too short, and clipping sets in {count} times "
        "later; Adam's steps hardly change.",
        "Kept as it is; divide once.",
    )


def _warn_of_ranks(plan: Plan, one: Division) -> None:
    plan.warn(
        one.place,
        "the loss is divided by the number of ranks, over which gradients are averaged anyway: on "
        "2 ranks SGD's steps are 1/2, on 8 ranks 1/8 of what the mean gives.",
        "Kept as it is; leave the division out unless the loss is a sum over all ranks' samples.",
    )
