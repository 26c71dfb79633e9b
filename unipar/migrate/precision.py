"""Mixed precision: autocast and the GradScaler become the run's ``precision``."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from unipar.migrate.defaults import UNSEEN, by_default
from unipar.migrate.literals import argument, constant
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source

AUTOCAST = (
    "torch.autocast", "torch.amp.autocast", "torch.cuda.amp.autocast", "torch.cpu.amp.autocast",
    "torch.amp.autocast_mode.autocast", "torch.cuda.amp.autocast_mode.autocast",
)  # fmt: skip
SCALER = (
    "torch.amp.GradScaler", "torch.cuda.amp.GradScaler", "torch.cpu.amp.GradScaler",
    "torch.amp.grad_scaler.GradScaler", "torch.cuda.amp.grad_scaler.GradScaler",
    "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
)  # fmt: skip
_METHODS = ("scale", "step", "update", "unscale_", "state_dict", "load_state_dict", "get_scale")
_HANDED_ON = (
    cst.Arg, cst.AssignTarget, cst.Assign, cst.Return, cst.Element, cst.DictElement, cst.Param
)  # fmt: skip
_NO_GRADIENTS = {"torch.no_grad", "torch.inference_mode", "torch.autograd.no_grad",
                 "torch.autograd.grad_mode.no_grad",
                 "torch.autograd.grad_mode.inference_mode"}  # fmt: skip
_DTYPES = {"torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16"}


def rewrite_precision(plan: Plan) -> bool:
    """Rewrite autocast and GradScaler.

    Returns:
        Whether the script computes in half precision.
    """
    casts, scalers = plan.calls(*AUTOCAST), plan.calls(*SCALER)
    _check_contexts(plan)
    computed: str | None = plan.config.get("precision")
    for source, call in casts:
        precision = _precision(plan, source, call)
        if precision is None:
            continue
        computed = precision
        enabled = argument(call, None, "enabled")
        if enabled is None or constant(enabled) is True:
            plan.set(call, "precision", precision)
            plan.replace(call, "script.autocast()")
        else:
            plan.set(call, "precision", _by_default(plan, enabled, precision))
            plan.replace(call, "script.autocast(enabled=", enabled, ")")
    for source, call in scalers:
        if any(not _is_device(one) for one in call.args) and not _enabled(plan, call, casts):
            plan.refuse(
                call, "an engine's GradScaler has torch's own settings.", "Leave these out."
            )
        if isinstance(source.parent(call), cst.Expr):
            plan.drop(call)
        else:
            plan.replace(call, "None")
    if scalers and computed != "fp16":
        plan.refuse(
            scalers[0][1],
            "the loss is scaled, but nothing computes in fp16.",
            "Use autocast in fp16, or leave the GradScaler out.",
        )
    if casts and not scalers and computed == "fp16":
        plan.refuse(
            casts[0][1],
            "fp16 without a GradScaler: gradients below 6e-8 become zero, which an engine's "
            "scaler prevents, so training would change.",
            "Add torch.amp.GradScaler, or use bfloat16.",
        )
    _drop_scaler_calls(plan)
    _check_scaler_uses(plan)
    return bool(casts)


def _check_contexts(plan: Plan) -> None:
    """Refuse contexts that are autocast or something else, as a run decides."""
    for source in plan.sources:
        for one in source.all(cst.WithItem):
            values = plan.flow.values(one.item)
            if plan.made_by(values, *AUTOCAST) and not all(v.name in AUTOCAST for v in values):
                plan.refuse(
                    one.item, "whether this computes in half precision is decided while it runs.",
                    "Write torch.autocast(..., enabled=...) in any case, with what decides it in "
                    "enabled.",
                )  # fmt: skip
        for node in (*source.all(cst.Name), *source.all(cst.Attribute)):
            if isinstance(source.parent(node), cst.Arg) and plan.flow.names(node) & {*AUTOCAST}:
                plan.refuse(
                    node, "autocast is handed on, and it cannot be seen where it is called.",
                    "Call it here.",
                )  # fmt: skip


def under_autocast(plan: Plan, source: Source, node: cst.CSTNode) -> bool:
    """Return whether a node is seen to be computed under autocast."""
    return any(plan.made_by(plan.flow.values(one), *AUTOCAST) for one in _contexts(source, node))


def without_gradients(plan: Plan, source: Source, node: cst.CSTNode) -> bool:
    """Return whether a node is seen to be computed where no gradients are."""
    return any(
        plan.flow.names(one.func if isinstance(one, cst.Call) else one) & _NO_GRADIENTS
        for one in _contexts(source, node)
    )


def _contexts(source: Source, node: cst.CSTNode) -> Iterator[cst.BaseExpression]:
    """What the ``with`` statements around a node in its function enter, and its decorators."""
    for above in source.around(node):
        if isinstance(above, cst.With):
            yield from (item.item for item in above.items)
        if isinstance(above, cst.FunctionDef):
            yield from (one.decorator for one in above.decorators)
            return


def _precision(plan: Plan, source: Source, call: cst.Call) -> str | None:
    dtype = argument(call, None, "dtype")
    names = plan.flow.names(call.func)
    by_type = bool(names & {"torch.autocast", "torch.amp.autocast"})
    if dtype is None and by_type and len(call.args) > 1 and call.args[1].keyword is None:
        dtype = call.args[1].value
    if constant(argument(call, None, "enabled")) is False:
        plan.refuse(
            call, "a region is kept in fp32 within half precision.",
            "Leave it out; unipar.yaml's precision holds for the whole forward pass.",
        )  # fmt: skip
        return None
    if dtype is not None:
        found = {_DTYPES.get(name) for name in plan.flow.names(dtype)}
        if len(found) == 1 and None not in found:
            return found.pop()
    else:
        kind = constant(argument(call, 0, "device_type")) if by_type else None
        if kind == "cuda" or names & {one for one in AUTOCAST if ".cuda." in one}:
            return "fp16"
        if kind == "cpu" or "torch.cpu.amp.autocast" in names:
            return "bf16"
    plan.refuse(call, "its dtype cannot be seen.", "Write dtype=torch.bfloat16 or torch.float16.")
    return None


def _drop_scaler_calls(plan: Plan) -> None:
    for name in ("unscale_", "update", "get_scale", "state_dict", "load_state_dict"):
        for _, call, func in plan.methods(name):
            if not plan.made_by(plan.flow.values(func.value), *SCALER):
                continue
            if name in ("unscale_", "update"):
                plan.drop(call)
            else:
                plan.refuse(
                    call, "the loss scale belongs to the engine.",
                    "Leave it out; session.save keeps the engine's.",
                )  # fmt: skip


def _check_scaler_uses(plan: Plan) -> None:
    """Refuse whatever would go another way now that the scaler is None."""
    for source in plan.sources:
        for node in (*source.all(cst.Name), *source.all(cst.Attribute)):
            if not plan.made_by(plan.flow.values(node), *SCALER):
                continue
            parent = source.parent(node)
            if isinstance(parent, cst.Attribute):
                known = parent.attr is node or parent.attr.value in _METHODS
            else:
                known = isinstance(parent, _HANDED_ON)
            if not known:
                plan.refuse(
                    node,
                    "what is done depends on there being a GradScaler.",
                    "Use it without asking; unipar.yaml's precision decides.",
                )


def _is_device(one: cst.Arg) -> bool:
    named = one.keyword is None or one.keyword.value == "device"
    return named and constant(one.value) in ("cuda", "cpu")


def _enabled(plan: Plan, call: cst.Call, casts: list[tuple[Source, cst.Call]]) -> bool:
    """Return whether a GradScaler is on, or on where autocast is."""
    asked = {
        source.code(enabled)
        for source, cast in casts
        if (enabled := argument(cast, None, "enabled")) is not None
    }
    source = plan.flow.source(call)
    rest = [one for one in call.args if not _is_device(one)]
    return all(
        (
            one.keyword is not None
            and one.keyword.value == "enabled"
            and (constant(one.value) is True or source.code(one.value) in asked)
        )
        or (one.keyword is None and "device" in str(getattr(one.value, "value", "")))
        for one in rest
    )


def _by_default(plan: Plan, enabled: cst.BaseExpression, precision: str) -> str:
    """The precision of a script that is given no flags, where that can be seen."""
    default = by_default(plan, enabled)
    if default is UNSEEN:
        plan.tell(
            enabled,
            f"unipar.yaml has precision: {precision}, for a run in which this is true.",
            "Where it is false, set precision: fp32, which the run then asks for.",
        )
    elif not default:
        plan.tell(
            enabled,
            "unipar.yaml has precision: fp32, since this is false unless it is asked for.",
            f"Where it is true, set precision: {precision}, which the run then asks for.",
        )
    return precision if default is UNSEEN or default else "fp32"
