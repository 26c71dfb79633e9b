"""Train mode, in which ``fit`` trains whatever mode a script has left its model in."""

from __future__ import annotations

from typing import NamedTuple

import libcst as cst

from unipar.migrate.fit.simple import Fold
from unipar.migrate.literals import argument, constant
from unipar.migrate.plan import Plan


class _Switch(NamedTuple):
    """A call of ``train()`` or ``eval()``.

    Attributes:
        at: the byte at which the function of the loop comes to it.
        inner: its own place.
        trains: whether it is train mode that it switches to.
        call: it.
    """

    at: int
    inner: int
    trains: bool
    call: cst.Call


def warn_of_mode(plan: Plan, fold: Fold) -> None:
    """Call out a model that is in eval mode where it is trained."""
    assert fold.loss is not None
    start, stop = fold.source.span(fold.whole)
    backward = fold.source.span(fold.loss)[0]
    switches = sorted(_switches(plan, fold), key=lambda one: one[:2])
    before = [one for one in switches if one.at < backward]
    last = [one for one in switches if start <= one.at < stop]
    inside = before[-1:] if before and before[-1].at >= start else []
    for one in (*(before[-1:]), *(inside or last[-1:])):
        if not one.trains:
            plan.warn(
                fold.whole,
                f"line {plan.flow.source(one.call).line(one.call)} puts the model into eval mode, "
                "in which it is then trained: without dropout, on BatchNorm's running statistics. "
                "fit trains in train mode.",
                "Nothing, where the model has neither.",
            )
            return


def _switches(plan: Plan, fold: Fold) -> list[_Switch]:
    source, home = fold.source, fold.source.function(fold.whole)
    model = plan.flow.values(fold.model)
    found: list[_Switch] = []
    for place, call, func in plan.methods("train", "eval"):
        if not plan.flow.values(func.value) & model:
            continue
        trains = func.attr.value == "train" and constant(argument(call, 0, "mode")) is not False
        inner, function = place.span(call)[0], place.function(call)
        if place is source and function is home:
            found.append(_Switch(inner, inner, trains, call))
            continue
        found += [
            _Switch(source.span(one)[0], inner, trains, call) for one in source.all(cst.Call)
            if source.function(one) is home and function in plan.flow.functions(one.func)
        ]  # fmt: skip
    return found
