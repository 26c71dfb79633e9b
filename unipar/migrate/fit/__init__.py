"""Folding a training loop that is simple enough into ``unipar.fit``."""

from __future__ import annotations

from unipar.migrate.dialects import Dialect
from unipar.migrate.fit.finding import find
from unipar.migrate.fit.simple import NotSimple
from unipar.migrate.fit.writing import write
from unipar.migrate.models import find_optimizers
from unipar.migrate.plan import Plan

REMEDY = "Leave --to fit out: the loop then stays as it is, and calls unipar's engine."


def fold(plan: Plan, dialect: Dialect) -> None:
    """Decide on the edits that fold a program's loop, or refuse by name what keeps it from that.

    Args:
        plan: the program.
        dialect: what it is written for.
    """
    backwards = [
        call for _, call, func in plan.methods("backward") if not plan.flow.functions(func)
    ]
    if not backwards:
        return
    if dialect.name != "torch":
        plan.refuse(
            backwards[0],
            f"this is a script for {dialect.title}; loops of one device are folded into fit.",
            REMEDY,
        )
        return
    find_optimizers(plan)
    try:
        write(plan, find(plan, backwards))
    except NotSimple as error:
        plan.refuse(error.node, error.why, REMEDY)
