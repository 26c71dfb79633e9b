"""The data that the training loop goes over."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.literals import argument, constant
from unipar.migrate.plan import Plan
from unipar.migrate.source import Source

LOADER = ("torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader")
SAMPLER = (
    "torch.utils.data.DistributedSampler", "torch.utils.data.distributed.DistributedSampler"
)  # fmt: skip


def split_loaders(plan: Plan) -> set[cst.Call]:
    """Let each rank have its share of the batches that the script trains on.

    Returns:
        The calls that build the loaders of these.
    """
    training = _training_functions(plan)
    split: set[cst.Call] = set()
    for source in plan.sources:
        for loop in source.all(cst.For):
            if not _trains(plan, source, loop, training):
                continue
            for one in plan.flow.values(loop.iter):
                if one.name in LOADER and isinstance(one.node, cst.Call):
                    split.add(one.node)
    for _, call in plan.calls(*LOADER):
        if call in split:
            plan.replace(call, "script.split(", call, ")")
    for source in plan.sources:
        for call in source.all(cst.Call):
            if split and constant(argument(call, None, "reduction")) == "sum":
                plan.tell(
                    call,
                    "if this is trained on, its gradient on n processes is about 1/n of what it is "
                    "on one: ranks are averaged, as is right for means.",
                    "Use a mean, or stay on one process.",
                )
    if not split and plan.optimizers:
        node = next(iter(plan.optimizers)).node
        if node is not None:
            plan.tell(
                node,
                "no DataLoader is seen that training goes over: on several processes each "
                "computes the same batches.",
                "Iterate over a DataLoader to divide the work.",
            )
    return split


def rewrite_samplers(plan: Plan) -> None:
    """Let samplers ask the run which share of the data is this rank's."""
    for source, call in plan.calls(*SAMPLER):
        hidden = next((one for one in call.args if one.star), None)
        if hidden is not None:
            plan.refuse(
                call,
                f"which ranks share the data may be hidden in `{source.code(hidden)}`.",
                "Write the arguments out: num_replicas=..., rank=...",
            )
            continue
        given = [
            one for position, one in enumerate(call.args)
            if (one.keyword is not None and one.keyword.value in ("num_replicas", "rank"))
            or (one.keyword is None and position in (1, 2))
        ]  # fmt: skip
        for one in given:
            name = one.keyword.value if one.keyword else ("num_replicas", "rank")[
                list(call.args).index(one) - 1]  # fmt: skip
            value = "data_size" if name == "num_replicas" else "data_rank"
            plan.replace(one.value, f"script.world().{value}")
        if not given and call.args:
            last = call.args[-1]
            plan.replace(
                last, last,
                ", num_replicas=script.world().data_size, rank=script.world().data_rank",
            )  # fmt: skip
        if constant(argument(call, None, "drop_last")) is True:
            plan.tell(call, "drop_last leaves samples out of each epoch, as before.")


def _training_functions(plan: Plan) -> set[cst.CSTNode]:
    """The functions that run a backward pass, themselves or through others."""
    found: set[cst.CSTNode] = {
        source.function(call) for source, call, _ in plan.methods("backward")
    }
    found = {one for one in found if isinstance(one, cst.FunctionDef)}
    while True:
        more = {
            source.function(call)
            for source in plan.sources
            for call in source.all(cst.Call)
            if any(one in found for one in plan.flow.functions(call.func))
        }
        more = {one for one in more if isinstance(one, cst.FunctionDef)}
        if more <= found:
            return found
        found |= more


def _trains(plan: Plan, source: Source, loop: cst.For, training: set[cst.CSTNode]) -> bool:
    for call in source.all(cst.Call):
        if loop not in source.loops(call):
            continue
        named = isinstance(call.func, cst.Attribute) and call.func.attr.value == "backward"
        if named or any(one in training for one in plan.flow.functions(call.func)):
            return True
    return False
