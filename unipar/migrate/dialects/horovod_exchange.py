"""Horovod's broadcasts and collectives on the script's own values."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.leftovers import Leftovers
from unipar.migrate.literals import argument, constant
from unipar.migrate.loop import is_plain
from unipar.migrate.models import optimizers_of
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source

_HVD = "horovod.torch."
_OPS = {"Average": "mean", "Sum": "sum", "Min": "min", "Max": "max", "Product": "product"}


def rewrite_exchange(plan: Plan, left: Leftovers) -> None:
    """Rewrite broadcasts, reductions and gathers.

    Args:
        plan: the program; its optimizers are known.
        left: notes what is dealt with.
    """
    for source, call in plan.calls(f"{_HVD}broadcast_parameters"):
        _weights(plan, source, call)
        left.settle(call)
    for source, call in plan.calls(f"{_HVD}broadcast_optimizer_state"):
        _optimizer(plan, source, call)
        left.settle(call)
    for name, text in (("broadcast_object", "broadcast"), ("broadcast", "broadcast"),
                       ("allgather_object", "gather")):  # fmt: skip
        for _, call in plan.calls(f"{_HVD}{name}"):
            given = _given(plan, call)
            if given is not None:
                plan.replace(call, f"script.world().{text}(", given, ")")
            left.settle(call.func)
    for _, call in plan.calls(f"{_HVD}allgather"):
        given = _given(plan, call)
        if given is not None:
            plan.replace(call, "script.all_gather(", given, ")")
        left.settle(call.func)
    for _, call in plan.calls(f"{_HVD}allreduce"):
        _reduce(plan, call, left)
        left.settle(call.func)


def _given(plan: Plan, call: cst.Call) -> cst.BaseExpression | None:
    """What is exchanged, if all ranks take part and rank 0 is what is taken from."""
    root = argument(call, 1, "root_rank")
    sends = any(".broadcast" in name for name in plan.flow.names(call.func))
    if sends and root is not None and constant(root) != 0:
        plan.refuse(
            call, "it is another rank than 0, or it is decided while it runs.",
            "Broadcast from rank 0.",
        )  # fmt: skip
        return None
    for name in ("process_set", "prescale_factor", "postscale_factor"):
        if argument(call, None, name) is not None:
            plan.refuse(
                call, f"`{name}` has no counterpart under other strategies.", "Leave it out."
            )
            return None
    if not call.args:
        return None
    return call.args[0].value


def _weights(plan: Plan, source: Source, call: cst.Call) -> None:
    given = _given(plan, call)
    if given is None:
        return
    inner = given
    if (
        isinstance(inner, cst.Call)
        and {"list", "dict"} & plan.flow.names(inner.func)
        and inner.args
    ):
        inner = inner.args[0].value
    func = inner.func if isinstance(inner, cst.Call) else None
    if (
        not isinstance(func, cst.Attribute)
        or func.attr.value not in ("state_dict", "named_parameters", "parameters")
        or not is_plain(func.value)
    ):
        plan.refuse(
            call, "it cannot be seen which model's weights these are.",
            "Write hvd.broadcast_parameters(model.state_dict(), root_rank=0).",
        )  # fmt: skip
        return
    if _before_optimizer(plan, source, call, func.value):
        plan.drop(call)
    else:
        plan.replace(call, f"script.broadcast_weights({source.code(func.value)})")


def _before_optimizer(
    plan: Plan, source: Source, call: cst.Call, model: cst.BaseExpression
) -> bool:
    """Return whether the model is prepared after a call, in the same function."""
    for origin, owner in plan.optimizers.items():
        node = origin.node
        if node is None or plan.flow.source(node) is not source:
            continue
        same = source.function(node) is source.function(call)
        if not same or not plan.flow.values(owner) & plan.flow.values(model) & plan.models:
            continue
        if source.span(call)[0] < source.span(node)[0]:
            return True
    return False


def _optimizer(plan: Plan, source: Source, call: cst.Call) -> None:
    given = _given(plan, call)
    if given is None:
        return
    mine = optimizers_of(plan.flow.values(given))
    if not mine or not is_plain(given):
        plan.refuse(
            call, "it cannot be seen which optimizer this is.",
            "Give migrate the file that builds it too.",
        )  # fmt: skip
        return
    counted = not any(
        place is source
        and source.function(wrap) is source.function(call)
        and source.span(wrap)[0] > source.span(call)[0]
        and plan.flow.values(wrap) & mine
        for place, wrap in plan.calls(f"{_HVD}DistributedOptimizer")
    )
    tail = ")" if counted else ", counted=False)"
    plan.replace(call, f"script.broadcast_optimizer({source.code(given)}{tail}")
    if any(not _is_indifferent(plan, one.node, one.name) for one in mine):
        adam = counted and any("adam" in one.name.lower() for one in mine)
        also = ", and counts as Adam's first, so that its next is 0.74 times as long" * adam
        plan.warn(
            call,
            "if the optimizer is new, Horovod takes a step on gradients of zero here, which "
            f"shrinks weights by lr * weight_decay once{also}.",
            "Kept as it is; without this line training begins as under other frameworks.",
        )


def _is_indifferent(plan: Plan, node: cst.CSTNode | None, name: str) -> bool:
    """Return whether a first step on gradients of zero changes nothing of what follows."""
    return (
        name == "torch.optim.SGD"
        and isinstance(node, cst.Call)
        and not any(one.star for one in node.args)
        and argument(node, 4, "weight_decay") is None
        and argument(node, 3, "dampening") is None
    )


def _reduce(plan: Plan, call: cst.Call, left: Leftovers) -> None:
    given = _given(plan, call)
    if given is None:
        return
    for other in call.args:
        if other.value is not given:
            left.settle(other)
    compression = argument(call, 3, "compression")
    if compression is not None and plan.flow.names(compression) != {f"{_HVD}Compression.none"}:
        plan.refuse(call, "what is reduced is rounded.", "Leave compression out.")
    average = argument(call, 1, "average")
    op = "sum" if average is not None and constant(average) is False else "mean"
    wanted = argument(call, 4, "op")
    if wanted is not None:
        names = {one.removeprefix(_HVD) for one in plan.flow.names(wanted)}
        found = {_OPS.get(one, "") for one in names}
        if len(found) != 1 or "" in found:
            plan.refuse(
                call, "it cannot be seen how it is reduced.",
                f"Give op= one of {', '.join(_OPS)}.",
            )  # fmt: skip
            return
        op = found.pop()
    plan.replace(call, "script.all_reduce(", given, ")" if op == "mean" else f', "{op}")')
