"""Calls of ``zero_grad()`` that an engine makes superfluous."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.expressions import Origin
from unipar.migrate.loop import Step, TrainingLoop
from unipar.migrate.models import optimizers_of
from unipar.migrate.source import Source


def drop_zero_grads(loop: TrainingLoop) -> None:
    """Take out what clears gradients, for an engine does so after each step.

    Refused is what would throw gradients away, and what clears none.
    """
    zeroed: list[tuple[Source, cst.Call, set[Origin]]] = []
    for source, call, func in loop.plan.methods("zero_grad"):
        values = loop.flow.values(func.value)
        if not (optimizers_of(values) or values & loop.plan.models):
            continue
        if source.statement(call) is None:
            loop.plan.refuse(call, "zero_grad is not a statement here.", "Make it one.")
        cleared = optimizers_of(values) | {
            origin for origin, model in loop.plan.optimizers.items()
            if loop.flow.values(model) & values & loop.plan.models
        }  # fmt: skip
        zeroed.append((source, call, cleared))
        if not _clears_nothing(loop, source, call):
            loop.plan.refuse(
                call,
                "gradients of an accumulation that is not full may be thrown away here; an "
                "engine steps on all that was added.",
                "Step on the rest too: `if (i + 1) % n == 0 or i + 1 == len(loader)`, or call "
                "zero_grad() only after the step.",
            )
        loop.plan.drop(call)
    for step in loop.steps:
        function = step.source.function(step.call)
        mine = optimizers_of(loop.flow.values(step.optimizer))
        every = [
            call for source, call, cleared in zeroed
            if source is step.source and source.function(call) is function and cleared & mine
        ]  # fmt: skip
        if every and not _cleared_between(loop, step, every):
            loop.plan.refuse(
                step.call,
                "gradients from another model's loss may be among those of this step; an "
                "engine steps on those of its own losses alone.",
                "Call zero_grad() between the other optimizer's step and this one's backward.",
            )
        if not every:
            loop.plan.refuse(
                step.call,
                "gradients are never cleared in this function, so each step would be on the "
                "sum of all so far; an engine clears them after each step.",
                "Call zero_grad() in it, if the sum is not meant.",
            )


def _cleared_between(loop: TrainingLoop, step: Step, zeroed: list[cst.Call]) -> bool:
    """Return whether another optimizer's losses leave no gradients in those of a step."""
    events = loop.events(step.source, step.source.function(step.call))
    steps = [one for _, one in events if one is not None]
    if len({one.text for one in steps}) < 2:
        return True
    at = step.source.span(step.call)[0]
    before = [place for place, one in events if one is not None and place < at]
    start = before[-1] if before else 0
    first = min((place for place, one in events if one is None and start < place < at),
                default=at)  # fmt: skip
    return any(start <= step.source.span(one)[0] < first for one in zeroed)


def _clears_nothing(loop: TrainingLoop, source: Source, call: cst.Call) -> bool:
    """Return whether no gradients can be waiting for a step at a ``zero_grad()``."""
    function = source.function(call)
    steps = [
        one.call for one in loop.steps
        if one.source is source and source.function(one.call) is function
    ]  # fmt: skip
    backwards = [
        one for place, one, _ in loop.backwards
        if place is source and source.function(one) is function
    ]  # fmt: skip
    block = source.block(call)
    if any(source.block(step) is block for step in steps):
        return _after_step(loop, source, call)
    if not backwards:
        return False
    if all(_comes_to(source, steps, source.block(one), source.span(one)[0]) for one in backwards):
        return _after_step(loop, source, call)
    loops = set(source.loops(call))
    if any(loops >= set(source.loops(one)) for one in backwards):
        return False
    if _flushed(loop, source, steps):
        return True
    depth = min(len(source.loops(one)) for one in backwards)
    whole = isinstance(function, cst.Module) or depth > 1
    first = min(source.span(one)[0] for one in backwards)
    return whole and not loops and source.span(call)[0] < first


def _comes_to(source: Source, steps: list[cst.Call], block: cst.CSTNode, after: int) -> bool:
    """Return whether a block comes to a step behind a place, whichever branches are taken."""
    return any(source.block(one) is block and source.span(one)[0] > after for one in steps) or any(
        isinstance(one, cst.If) and isinstance(one.orelse, cst.Else) and source.span(one)[0] > after
        and all(_comes_to(source, steps, branch, after) for branch in (one.body, one.orelse.body))
        for one in getattr(block, "body", ())
    )  # fmt: skip


def _after_step(loop: TrainingLoop, source: Source, call: cst.Call) -> bool:
    """Return whether what comes before a ``zero_grad()``, the loop's end included, is a step."""
    events = loop.events(source, source.function(call))
    before = [event for event in events if event[0] < source.span(call)[0]]
    inside = bool(source.loops(call)) or not before
    previous = before[-1:] or (events[-1:] if inside else [])
    return all(step is not None for _, step in previous)


def _flushed(loop: TrainingLoop, source: Source, steps: list[cst.Call]) -> bool:
    """Return whether steps are taken at the end of the data too: ``or i + 1 == len(loader)``."""
    for step in steps:
        test = next((a.test for a in source.around(step) if isinstance(a, cst.If)), None)
        if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.Or):
            last = (test.left, test.right)
            if any(isinstance(one, cst.Comparison) and "len(" in source.code(one)
                   and "==" in source.code(one) for one in last):  # fmt: skip
                return True
    return False
