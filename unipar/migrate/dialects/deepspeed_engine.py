"""How a script uses DeepSpeed's engine: as one that unipar has, or not."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.literals import constant
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source

ENGINE = "deepspeed.engine"
_ARGUMENTS = {
    "backward": ("loss",),
    "step": (),
    "train": ("mode",),
    "save_checkpoint": ("save_dir", "tag", "client_state"),
    "load_checkpoint": ("load_dir", "tag"),
}
_PLACES = ("device", "local_rank")


def check_engines(plan: Plan) -> bool:
    """Refuse what engines of unipar have not, and losses that do not go through one.

    Returns:
        Whether the script asks an engine where its device is.
    """
    from unipar.migrated.stepped import SteppedEngine

    members = {*dir(SteppedEngine), "module", "lr_scheduler", "micro_steps", "global_steps"}
    placed = False
    for source in plan.sources:
        for node in source.all(cst.Attribute):
            if not _is_engine(plan, node.value) or _is_module(node.value):
                continue
            placed |= node.attr.value in _PLACES
            parent = source.parent(node)
            if node.attr.value not in members or node.attr.value.startswith("_"):
                plan.refuse(
                    node, f"`{node.attr.value}` is of DeepSpeed's engine alone.",
                    "Leave it out: an engine clears and reduces gradients by itself.",
                )  # fmt: skip
            elif isinstance(parent, cst.Call) and parent.func is node:
                _check_arguments(plan, source, parent, node.attr.value)
    for _, _, func in plan.methods("state_dict", "load_state_dict"):
        if _is_module(func.value) and _is_engine(plan, func.value):
            plan.replace(func.value, "script.whole(", func.value, ")")
    _check_losses(plan)
    return placed


def _is_engine(plan: Plan, node: cst.CSTNode) -> bool:
    return plan.made_by(plan.flow.values(node), ENGINE)


def _is_module(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Attribute) and node.attr.value == "module"


def _check_arguments(plan: Plan, source: Source, call: cst.Call, name: str) -> None:
    allowed = _ARGUMENTS.get(name)
    if allowed is None:
        return
    for index, one in enumerate(call.args):
        word = one.keyword.value if one.keyword is not None else None
        known = word in allowed if word is not None else not one.star and index < len(allowed)
        if not known and constant(one.value) is not False:
            plan.refuse(
                call, f"`{source.code(one)}` is no argument that an engine takes.",
                "Leave it out.",
            )  # fmt: skip


def _check_losses(plan: Plan) -> None:
    """Refuse gradients that do not come from an engine's own forward and backward."""
    training: set[cst.CSTNode] = set()
    for source, call, func in plan.methods("backward"):
        if _is_engine(plan, func.value):
            training |= {*(source.loops(call) or [source.function(call)])}
        elif not plan.flow.functions(func):
            plan.refuse(
                call, "this backward pass goes around the engine.",
                "Call engine.backward(loss).",
            )  # fmt: skip
    models = {
        one
        for _, call in plan.calls("deepspeed.initialize")
        for arg in call.args
        if arg.keyword is not None and arg.keyword.value == "model"
        for one in plan.flow.values(arg.value)
        if one.kind == "call" and one.name != ENGINE
    }
    for source in plan.sources:
        for call in source.all(cst.Call):
            if training.isdisjoint([*source.loops(call), source.function(call)]):
                continue
            if not isinstance(call.func, (cst.Name, cst.Attribute)):
                continue
            values = plan.flow.values(call.func)
            around = values & models and not plan.made_by(values, ENGINE)
            if around or (_is_module(call.func) and _is_engine(plan, call.func)):
                plan.refuse(
                    call, "the model is called around the engine, where the loss is computed.",
                    "Call engine(...).",
                )  # fmt: skip
        for node in source.all(cst.Attribute):
            if node.attr.value == "grad" and not plan.flow.names(node):
                plan.refuse(
                    node,
                    "gradients are read or written; a strategy may scale or divide them.",
                    "Use gradient_clipping, and engine.get_global_grad_norm() for the norm.",
                )
