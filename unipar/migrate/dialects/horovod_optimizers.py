"""Optimizers that are wrapped in ``hvd.DistributedOptimizer``."""

from __future__ import annotations

from typing import Any

import libcst as cst

from unipar.migrate.clipping import CLIP
from unipar.migrate.dialects.horovod_compression import rewrite_compression
from unipar.migrate.leftovers import Leftovers
from unipar.migrate.literals import argument, constant
from unipar.migrate.models import optimizers_of
from unipar.migrate.plan import Plan
from unipar.migrate.processes import is_conditional
from unipar.migrate.source import Source

_HVD = "horovod.torch."
_ARGUMENTS = ("optimizer", "named_parameters", "compression", "backward_passes_per_step", "op",
              "gradient_predivide_factor", "num_groups", "groups", "sparse_as_dense",
              "process_set")  # fmt: skip
_DROPPED = ("optimizer", "named_parameters", "backward_passes_per_step")
_OPTIONS = ("gradient_predivide_factor", "num_groups", "groups", "sparse_as_dense")


def rewrite_optimizers(plan: Plan, left: Leftovers) -> None:
    """Take wrappers of optimizers away, and put their options into the settings.

    Args:
        plan: the program; its optimizers are known.
        left: notes what is dealt with.
    """
    # Horovod leaves buffers, such as BatchNorm's statistics, to each rank.
    options: dict[str, Any] = {"broadcast_buffers": False}
    for source, call in plan.calls(f"{_HVD}DistributedOptimizer"):
        inner = argument(call, 0, "optimizer")
        if inner is None:
            plan.refuse(call, "it cannot be seen what it wraps.", "Name the optimizer.")
            continue
        if is_conditional(source, call):
            plan.refuse(
                call,
                "whether the optimizer is wrapped is decided while it runs.",
                "Wrap it always: without a launcher unipar runs one process just so.",
            )
        for index, one in enumerate(call.args):
            name = one.keyword.value if one.keyword is not None else _ARGUMENTS[index]
            if one.value is not inner:
                left.settle(one)
                _take(plan, left, options, call, name, one.value)
        left.settle(call.func)
        _check_state(plan, source, call, inner)
        assign = source.parent(call)
        if isinstance(assign, cst.Assign) and [
            source.code(one.target) for one in assign.targets
        ] == [source.code(inner)]:
            source.remove(assign)
        else:
            plan.replace(call, inner)
            _refuse_steps_inside(plan, source, inner)
    plan.config["strategy"] = {"name": "horovod", **options}
    wrapped = {
        one
        for _, call in plan.calls(f"{_HVD}DistributedOptimizer")
        for one in plan.flow.values(call)
    }
    for origin in plan.optimizers:
        if origin not in wrapped and origin.node is not None:
            plan.refuse(
                origin.node,
                "this optimizer is not wrapped in hvd.DistributedOptimizer, so its model's "
                "replicas drift apart.",
                "Wrap it, and let the engine keep the replicas equal.",
            )


def _take(
    plan: Plan, left: Leftovers, options: dict[str, Any], call: cst.Call, name: str,
    value: cst.BaseExpression,
) -> None:  # fmt: skip
    """Turn an argument of ``DistributedOptimizer`` into an option."""
    source, literal = plan.flow.source(value), constant(value)
    names = {one.removeprefix(_HVD) for one in plan.flow.names(value)}
    if name == "compression":
        rewrite_compression(plan, left, options, call, value)
    elif name == "op" and names != {"Average"}:
        adasum = "Adasum" in names
        plan.refuse(
            value,
            "Adasum is another update than that by the average of the gradients." if adasum
            else "gradients are not averaged.",
            "Leave op out, with the option that asks for Adasum, and look for a learning rate "
            "that suits the average." if adasum
            else "Leave op out; for hvd.Sum multiply the loss by hvd.size().",
        )  # fmt: skip
    elif name in _OPTIONS and isinstance(literal, (int, float)):
        options["num_groups" if name == "groups" else name] = literal
    elif name == "gradient_predivide_factor":
        plan.tell(
            value, "in how many parts gradients are divided is no longer the command line's: "
            "all at once, which differs in rounding alone.",
            "gradient_predivide_factor below strategy in unipar.yaml divides them so.",
        )  # fmt: skip
    elif name not in (*_DROPPED, "op") and source.code(value) != "None":
        plan.refuse(
            call, f"unipar.yaml cannot say `{name}={source.code(value)}`.",
            f"Leave {name} out, or give a literal to one of {', '.join(_OPTIONS)}.",
        )  # fmt: skip


def _check_state(plan: Plan, source: Source, call: cst.Call, inner: cst.BaseExpression) -> None:
    mine = optimizers_of(plan.flow.values(inner))
    for place, load, func in plan.methods("load_state_dict"):
        same = place is source and source.function(load) is source.function(call)
        before = same and source.span(load)[0] < source.span(call)[0]
        if before and optimizers_of(plan.flow.values(func.value)) & mine:
            plan.warn(
                load,
                "Horovod's DistributedOptimizer threw this state away, so that moments began "
                "at zero; it is kept now.",
                "Leave it out if that was meant.",
            )


def _refuse_steps_inside(plan: Plan, source: Source, inner: cst.BaseExpression) -> None:
    """Refuse steps of an optimizer that another name has the wrapper of."""
    scope = source.scope(inner)
    if not isinstance(inner, cst.Name) or scope is None:
        return
    for place, call, func in plan.methods("step"):
        stepped = place.scope(func.value)
        if (
            isinstance(func.value, cst.Name)
            and func.value.value == inner.value
            and stepped is not None
            and stepped[inner.value] is scope[inner.value]
        ):
            plan.refuse(
                call, "it steps the optimizer inside, which does not wait until Horovod has "
                "averaged the gradients.", "Step what hvd.DistributedOptimizer gives back.",
            )  # fmt: skip


def drop_synchronizing(plan: Plan) -> None:
    """Take out what Horovod's optimizer has and others have not."""
    complete = {
        (source.name, source.function(call)) for source, call, _ in plan.methods("synchronize")
    }
    for source, call in plan.calls(*CLIP):
        if (source.name, source.function(call)) not in complete:
            plan.warn(
                call,
                "gradients were clipped while Horovod averaged them: to each rank's own norm, or "
                "not at all.",
                "The average is clipped now, as after optimizer.synchronize().",
            )
    for source, call, func in plan.methods(
        "synchronize", "skip_synchronize", "set_backward_passes_per_step"
    ):
        if not optimizers_of(plan.flow.values(func.value)):
            continue
        if func.attr.value != "skip_synchronize":
            plan.drop(call)
            continue
        item = source.parent(call)
        with_ = source.parent(item) if item is not None else None
        if not isinstance(with_, cst.With) or len(with_.items) != 1:
            plan.refuse(call, "it is no `with` statement by itself.",
                        "Write `with optimizer.skip_synchronize():`.")  # fmt: skip
        elif not source.unwrap(with_):
            plan.replace(call, "script.no_sync()")
