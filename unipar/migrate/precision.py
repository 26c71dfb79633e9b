"""Mixed precision: autocast and the GradScaler become the run's ``precision``."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.history import last_write
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
_DTYPES = {"torch.float16": "fp16", "torch.half": "fp16", "torch.bfloat16": "bf16"}


def rewrite_precision(plan: Plan) -> bool:
    """Rewrite autocast and GradScaler.

    Returns:
        Whether the script computes in half precision.
    """
    casts, scalers = plan.calls(*AUTOCAST), plan.calls(*SCALER)
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
        found = {_DTYPES.get(name) for name in plan.flow.names(dtype)} - {None}
        if len(found) == 1:
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
    """Whether a GradScaler is on, or on where autocast is."""
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
    default = _default(plan, enabled)
    if default is None:
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
    return "fp32" if default is False else precision


def _default(plan: Plan, node: cst.BaseExpression) -> bool | None:
    """What a flag is if it is not given; ``None`` where that cannot be seen."""
    source = plan.flow.source(node)
    write = last_write(source, node)
    if write is not None and write.operator is None and write.value is not node:
        return _default(plan, write.value)
    value = constant(node)
    if isinstance(value, bool):
        return value
    if not isinstance(node, cst.Attribute):
        return None
    for _, call, _ in plan.methods("add_argument"):
        flags = [constant(one.value) for one in call.args if one.keyword is None]
        names = {str(flag).lstrip("-").replace("-", "_") for flag in flags}
        if node.attr.value in names | {constant(argument(call, None, "dest"))}:
            if constant(argument(call, None, "action")) == "store_true":
                return False
            given = constant(argument(call, None, "default"))
            return given if isinstance(given, bool) else None
    return None
