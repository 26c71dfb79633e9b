"""Computation on one rank alone, which only some strategies allow."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.plan import Plan
from unipar.migrate.processes import on_some_ranks
from unipar.migrate.tree import inside

_DEPTH = 4
"""How many functions deep a model's call is looked for."""


def tell_of_lone_ranks(plan: Plan, engines: tuple[str, ...]) -> None:
    """Note where only some ranks come to a model, which others may hold parts of.

    Args:
        plan: the program; its models are known.
        engines: what else computes as a model does, by name.
    """
    for source in plan.sources:
        for call in source.all(cst.Call):
            if on_some_ranks(plan, source, call) and _reaches_model(plan, call, engines, _DEPTH):
                plan.tell(
                    call,
                    "only some ranks compute this. Strategies that divide the model's weights "
                    "(fsdp, zero3) need all ranks for it, and would wait for the others.",
                    "Let every rank come to it before choosing one of those.",
                )


def _reaches_model(plan: Plan, call: cst.Call, engines: tuple[str, ...], depth: int) -> bool:
    values = plan.flow.values(call.func)
    if values & plan.models or plan.made_by(values, *engines):
        return True
    return depth > 0 and any(
        _reaches_model(plan, one, engines, depth - 1)
        for function in plan.flow.functions(call.func)
        for one in inside(function)
        if isinstance(one, cst.Call)
    )
