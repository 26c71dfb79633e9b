"""``Accelerator.prepare``, which wraps models, deals out data, and paces schedulers."""

from __future__ import annotations

from typing import NamedTuple

import libcst as cst

from unipar.migrate.expressions import Origin
from unipar.migrate.loaders import LOADER
from unipar.migrate.loop import SCHEDULERS
from unipar.migrate.models import optimizers_of
from unipar.migrate.plan import Plan

PREPARING = {"prepare": "", "prepare_model": "model", "prepare_optimizer": "optimizer",
             "prepare_data_loader": "loader", "prepare_scheduler": "scheduler"}  # fmt: skip


class Prepared(NamedTuple):
    """One argument of ``prepare``.

    Attributes:
        node: it.
        before: text that is put in front of it.
        after: and behind.
    """

    node: cst.BaseExpression
    before: str
    after: str


def rewrite_prepare(plan: Plan, call: cst.Call, receiver: str, kind: str, split: bool) -> None:
    """Rewrite one call of ``prepare`` or of its like.

    Args:
        plan: the program; its optimizers are known.
        call: the call.
        receiver: the code of the Accelerator.
        kind: what it is given, if its name says so.
        split: whether batches are split, so that schedulers step once.
    """
    source = plan.flow.source(call)
    if any(one.star or one.keyword is not None for one in call.args) or not call.args:
        plan.refuse(
            call, "it cannot be seen what is prepared, or how.",
            "Write out what is prepared, and leave device_placement out.",
        )  # fmt: skip
        return
    done = [_prepared(plan, call, one.value, receiver, kind) for one in call.args]
    if any(one is not None and ".pace(" in one.before for one in done) and not split:
        plan.warn(
            call,
            "a prepared scheduler takes as many steps in each call as there are processes: on 2 "
            "it is through after half of the calls.",
            "Kept as it is, under every strategy; split_batches=True makes it one step.",
        )
    known = [one for one in done if one is not None]
    if len(known) < len(done):
        return
    above = source.parent(call)
    targets = _targets(above) if isinstance(above, cst.Assign) else None
    if isinstance(above, cst.Assign) and targets is not None and len(targets) == len(known):
        pairs = [
            (target, one)
            for target, one in zip(targets, known, strict=True)
            if one.before or source.code(target) != source.code(one.node)
        ]
        if not pairs:
            source.remove(above)
            return
        parts: list[str | cst.CSTNode] = []
        for index, (target, _) in enumerate(pairs):
            parts += [", ", target] if index else [target]
        plan.replace(above, *parts, " = ", *_listed([one for _, one in pairs]))
    elif len(known) == 1:
        plan.replace(call, *_listed(known))
    else:
        plan.replace(call, "(", *_listed(known), ")")


def _targets(assign: cst.Assign) -> list[cst.BaseExpression] | None:
    if len(assign.targets) != 1:
        return None
    target = assign.targets[0].target
    if not isinstance(target, (cst.Tuple, cst.List)):
        return [target]
    if any(isinstance(one, cst.StarredElement) for one in target.elements):
        return None
    return [one.value for one in target.elements]


def _listed(known: list[Prepared]) -> list[str | cst.CSTNode]:
    parts: list[str | cst.CSTNode] = []
    for index, one in enumerate(known):
        parts += [", " if index else "", one.before, one.node, one.after]
    return [part for part in parts if part != ""]


def _prepared(
    plan: Plan, call: cst.Call, node: cst.BaseExpression, receiver: str, kind: str
) -> Prepared | None:
    """What an argument becomes; ``None``, and refused, where it cannot be seen what it is."""
    values = plan.flow.values(node)
    if values & plan.models or optimizers_of(values):
        return Prepared(node, "", "")
    kinds = {kind} if kind else {_kind(plan, one) for one in values if one.kind == "call"}
    if kinds == {"loader"}:
        return Prepared(node, f"{receiver}.deal(", ")")
    if kinds == {"scheduler"}:
        return Prepared(node, f"{receiver}.pace(", ")")
    if kinds == {"model"}:
        return Prepared(node, "", ".to(script.device())")
    plan.refuse(
        call,
        f"it cannot be seen whether `{plan.flow.source(node).code(node)}` is a model, an "
        "optimizer, a DataLoader or a scheduler.",
        "Give migrate the file that builds it too, or use prepare_model, prepare_data_loader, …",
    )
    return None


def _kind(plan: Plan, origin: Origin) -> str:
    name, node = origin.name, origin.node
    if name in LOADER:
        return "loader"
    if name.startswith(SCHEDULERS):
        return "scheduler"
    if isinstance(node, cst.Call):
        if any(optimizers_of(plan.flow.values(one.value)) for one in node.args):
            return "scheduler"
        if name.startswith(("torch.nn.", "torchvision.models.")) or _is_transformer(name):
            return "model"
        own = any(one.kind == "class" for one in plan.flow.values(node.func))
        if own and plan.flow.is_module(origin):
            return "model"
    return ""


def _is_transformer(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "transformers" and any("Model" in part or "For" in part for part in parts)
