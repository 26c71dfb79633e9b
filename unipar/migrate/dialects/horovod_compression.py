"""Horovod's compression of gradients."""

from __future__ import annotations

from typing import Any

import libcst as cst

from unipar.migrate.leftovers import Leftovers
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source

_HVD = "horovod.torch."


def rewrite_compression(
    plan: Plan, left: Leftovers, options: dict[str, Any], call: cst.Call, value: cst.BaseExpression
) -> None:
    """Turn ``compression=`` into an option, and take out the variable that holds it.

    Args:
        plan: the program.
        left: notes what is dealt with.
        options: of the strategy; gets ``compression``.
        call: of ``DistributedOptimizer``.
        value: what it is given.
    """
    names = {one.removeprefix(_HVD) for one in plan.flow.names(value)}
    if not names or names - {"Compression.none", "Compression.fp16"}:
        plan.refuse(call, "it cannot be seen what compresses gradients.",
                    "Use hvd.Compression.fp16 or none.")  # fmt: skip
    elif names == {"Compression.fp16"}:
        options["compression"] = "fp16"
    elif len(names) == 2:
        plan.warn(
            call,
            "whether gradients are rounded to fp16, to 11 bits, was decided while it runs; now "
            "they are not.",
            "compression: fp16 below strategy in unipar.yaml rounds them.",
        )
    for source in plan.sources:
        for assign in source.all(cst.Assign):
            if _only_holds(plan, source, assign, value):
                source.remove(assign)
                left.settle(assign)


def _only_holds(plan: Plan, source: Source, assign: cst.Assign, used: cst.BaseExpression) -> bool:
    """Whether an assignment binds a compression to the name that is used, and nothing else does."""
    target = assign.targets[0].target
    if not isinstance(target, cst.Name) or not isinstance(used, cst.Name):
        return False
    names = plan.flow.names(assign.value)
    return (
        bool(names)
        and all(one.startswith(f"{_HVD}Compression.") for one in names)
        and target.value == used.value
        and source is plan.flow.source(used)
        and sum(one.value == target.value for one in source.all(cst.Name)
                if not isinstance(source.parent(one), cst.Arg)
                or getattr(source.parent(one), "keyword", None) is not one) == 2
    )  # fmt: skip
