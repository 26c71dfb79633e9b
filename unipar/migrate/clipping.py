"""Gradient clipping: the strategy does it, with the norm that the script gives."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.expressions import Origin
from unipar.migrate.literals import argument, constant
from unipar.migrate.loop import Step, TrainingLoop, is_plain
from unipar.migrate.models import optimizers_of
from unipar.migrate.plan import Clip, Words
from unipar.migrate.source import Source
from unipar.migrate.tracing import is_none
from unipar.migrate.tree import children
from unipar.migrate.tree import inside as parts_of

CLIP = ("torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad.clip_grad_norm_")
_CLIP_VALUE = ("torch.nn.utils.clip_grad_value_", "torch.nn.utils.clip_grad.clip_grad_value_")
_COMPUTING = (cst.Integer, cst.Float, cst.Comparison, cst.BooleanOperation, cst.UnaryOperation,
              cst.BinaryOperation)  # fmt: skip


def drop_clipping(loop: TrainingLoop) -> dict[Origin, str]:
    """Take out clipping by norm, which the strategy does.

    Returns:
        For each optimizer whose gradients are clipped, the code of the norm that they are clipped
        to.
    """
    found: dict[Origin, str] = {}
    clipped: set[cst.Call] = set()
    for _, call in loop.plan.calls(*_CLIP_VALUE):
        loop.plan.refuse(
            call, "gradients are clipped by value; strategies clip by norm.",
            "Use clip_grad_norm_.",
        )  # fmt: skip
    clips = {call: _torch_clip(call) for _, call in loop.plan.calls(*CLIP)}
    for call, (norm, kind, model) in {**clips, **loop.plan.clips}.items():
        source = loop.flow.source(call)
        step, test = _step_after(loop, source, call), None
        taken = _taken(loop, source, call, step) if step is not None else None
        if step is None:
            test = _condition(source, call)
            step = _step_after(loop, source, test) if test is not None else None
        elif others := _steps_otherwise(loop, source, step):
            test = _condition(source, call)
            clipped |= others
        if step is None or norm is None or (source.statement(call) is None and taken is None):
            loop.plan.refuse(
                call,
                "it does not stand alone in front of the step, in the same block, or its norm is "
                "used before the step.",
                "Put it there; script.grad_norm gives the norm after the step."
                if _gives_norms(loop)
                else "Put it there, and leave its norm unused.",
            )
            continue
        if kind is not None and constant(kind) != 2:
            loop.plan.refuse(call, "strategies clip by the 2-norm.", "Use norm_type=2.")
        if step.scaled and not _unscaled_before(loop, source, call):
            loop.plan.refuse(
                call,
                "clips before scaler.unscale_(), so gradients are clipped while they are "
                "multiplied by the loss scale (65536 at first): to max_norm / 65536, which "
                "all but stops training.",
                "Call scaler.unscale_(optimizer) before it.",
            )
        for origin in optimizers_of(loop.flow.values(step.optimizer)):
            _check_covered(loop, origin, call, model)
            for one, what in ((norm, "norm"), (test, "condition")):
                if one is not None and not _is_known(loop, origin, one):
                    loop.plan.refuse(
                        call,
                        f"the {what} `{source.code(one)}` is not known where the optimizer is "
                        "built, as clipping belongs to the strategy.",
                        "Use a number, or a name that is bound there.",
                    )
            asked = f" if {source.code(test)} else None" if test is not None else ""
            code = f"{source.code(norm)}{asked}"
            if found.setdefault(origin, code) != code:
                _refuse_other(loop, call)
        clipped.add(step.call)
        if taken is None:
            loop.plan.drop(call)
        else:
            source.remove(taken)
            name = source.code(taken.targets[0].target)
            loop.plan.replace(step.call, f"{name} = script.grad_norm(", step.call, ")")
    for step in loop.steps:
        if step.call not in clipped and optimizers_of(loop.flow.values(step.optimizer)) & {*found}:
            _refuse_other(loop, step.call)
    return found


def _refuse_other(loop: TrainingLoop, call: cst.Call) -> None:
    loop.plan.refuse(
        call, "other steps of this optimizer are clipped, or to another norm; a strategy clips "
        "every step alike.", "Clip before each step, to one norm.",
    )  # fmt: skip


def _condition(source: Source, call: cst.Call) -> cst.BaseExpression | None:
    """Find the condition right around a call: ``if args.clip is not None:``."""
    block = source.block(call)
    above = source.parent(block)
    return above.test if isinstance(above, cst.If) and above.body is block else None


def _steps_otherwise(loop: TrainingLoop, source: Source, step: Step) -> set[cst.Call]:
    """The steps of the same optimizer in the ``else`` of the branch that a step stands in."""
    above = source.parent(source.block(step.call))
    if not isinstance(above, cst.If) or not isinstance(above.orelse, cst.Else):
        return set()
    return {
        one.call for one in loop.steps
        if one.text == step.text and above.orelse.body in (*source.around(one.call),)
    }  # fmt: skip


def _step_after(loop: TrainingLoop, source: Source, node: cst.CSTNode) -> Step | None:
    """The next step in the block of a node."""
    return next(
        (
            one for one in loop.steps
            if one.source is source and source.block(one.call) is source.block(node)
            and source.span(one.call)[0] > source.span(node)[0]
        ),
        None,
    )  # fmt: skip


def _taken(loop: TrainingLoop, source: Source, call: cst.Call, step: Step) -> cst.Assign | None:
    """The statement that names the norm, if the name is not read before the step."""
    assign = source.parent(call)
    if not isinstance(assign, cst.Assign) or len(assign.targets) > 1:
        return None
    name = assign.targets[0].target
    start, stop = source.span(assign)[1], source.span(step.call)[0]
    used = any(
        source.code(one) == source.code(name) and start <= source.span(one)[0] < stop
        for one in (*source.all(cst.Name), *source.all(cst.Attribute))
    )
    return assign if is_plain(name) and _gives_norms(loop) and not used else None


def _gives_norms(loop: TrainingLoop) -> bool:
    """Return whether a migrated step returns what ``script.grad_norm`` reads."""
    return loop.plan.words.step == Words().step


def _torch_clip(call: cst.Call) -> Clip:
    given = argument(call, 0, "parameters")
    func = given.func if isinstance(given, cst.Call) else None
    model = None
    if isinstance(func, cst.Attribute) and func.attr.value == "parameters":
        model = func.value
    return Clip(argument(call, 1, "max_norm"), argument(call, 2, "norm_type"), model)


def _check_covered(
    loop: TrainingLoop, origin: Origin, call: cst.Call, clipped: cst.BaseExpression | None
) -> None:
    model = loop.plan.optimizers.get(origin)
    if (
        clipped is None
        or model is None
        or not loop.flow.values(clipped) & loop.flow.values(model) & loop.plan.models
    ):
        loop.plan.refuse(
            call, "strategies clip all gradients of a model together.",
            "Clip model.parameters().",
        )  # fmt: skip


def _is_known(loop: TrainingLoop, origin: Origin, node: cst.BaseExpression) -> bool:
    """Return whether what an expression computes is known where an optimizer is built."""
    if isinstance(node, (cst.Name, cst.Attribute)):
        return _known_at(loop, origin, node)
    parts = children(node)
    return isinstance(node, _COMPUTING) and all(
        _is_known(loop, origin, one) for one in parts if isinstance(one, cst.BaseExpression)
    ) and all(
        _is_known(loop, origin, one.comparator)
        for one in parts if isinstance(one, cst.ComparisonTarget)
    )  # fmt: skip


def _known_at(loop: TrainingLoop, origin: Origin, norm: cst.BaseExpression) -> bool:
    if constant(norm) is not None or is_none(norm):
        return True
    if not is_plain(norm) or origin.node is None:
        return False
    root = norm
    while isinstance(root, cst.Attribute):
        root = root.value
    here, there = loop.flow.source(norm), loop.flow.source(origin.node)
    if here is not there or not isinstance(root, cst.Name):
        return False
    function = there.function(origin.node)
    if loop.flow.values(root) and all(one.kind == "self" for one in loop.flow.values(root)):
        return _bound_before(there, origin.node, norm)
    own = here.scope(root)
    bindings = own[root.value] if own else []
    scopes = [one.scope for one in bindings if one.scope is not None]
    top = here.scope(here.tree)
    inside = here.function(norm) is function
    bound = min((here.span(one.node)[0] for one in bindings if one.node is not None), default=0)
    late = inside and bound > there.span(origin.node)[0]
    if not inside and _is_handed_on(loop, there, origin.node, root):
        return True
    return bool(scopes) and not late and all(scope is top or inside for scope in scopes)


def _is_handed_on(loop: TrainingLoop, there: Source, node: cst.CSTNode, root: cst.Name) -> bool:
    """Whether a name is a parameter that is given what the same name holds at another node."""
    scope = next((s for one in parts_of(node) if (s := there.scope(one)) is not None), None)
    bindings = scope[root.value] if scope is not None else []
    lines = [there.span(one.node)[0] for one in bindings if one.node is not None]
    if scope is None or not lines or min(lines) > there.span(node)[0]:
        return False
    held = loop.flow.values(root)
    return len(held) == 1 and held == loop.flow.named(there, scope, root.value)


def _bound_before(there: Source, node: cst.CSTNode, norm: cst.BaseExpression) -> bool:
    """Return whether ``self.norm`` is set in front of a node, in the function that it is in."""
    while isinstance(norm, cst.Attribute) and isinstance(norm.value, cst.Attribute):
        norm = norm.value
    text, function = there.code(norm), there.function(node)
    return there.class_(function) is not None and any(
        there.function(one) is function
        and there.span(one)[0] < there.span(node)[0]
        and any(there.code(target.target) == text for target in one.targets)
        for one in there.all(cst.Assign)
    )


def _unscaled_before(loop: TrainingLoop, source: Source, call: cst.Call) -> bool:
    return any(
        place is source
        and source.block(one) is source.block(call)
        and source.span(one)[0] < source.span(call)[0]
        for place, one, _ in loop.plan.methods("unscale_")
    )
