"""Refusals of code that bypasses the engine."""

from __future__ import annotations

import libcst as cst

from unipar.migrate.expressions import WRAPPERS
from unipar.migrate.imports import imported
from unipar.migrate.plan import Plan

_BY_HAND = "Port this by hand (docs/how-to/own-loop.md)."
SYNC_BATCHNORM = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
REFUSED = {
    "torch.compile": ("the compiled model is another one than the engine's.",
                      "Leave it out."),
    "torch.jit.script": ("the compiled model is another one than the engine's.", "Leave it out."),
    "torch.jit.trace": ("the compiled model is another one than the engine's.", "Leave it out."),
    "torch.func.functional_call": ("the model is called around the engine.", _BY_HAND),
    "torch.nn.utils.stateless.functional_call": ("the model is called around the engine.",
                                                 _BY_HAND),
    "torch.nn.DataParallel": ("one process drives several GPUs.",
                              "Leave it out; strategy: ddp uses a process for each."),
    "torch.nn.parallel.DataParallel": ("one process drives several GPUs.",
                                       "Leave it out; strategy: ddp uses a process for each."),
    SYNC_BATCHNORM: (
        "the strategy converts the model.",
        "Leave it out, and set sync_batchnorm: true under the strategy ddp."),
    "torch.optim.LBFGS": ("it runs the model several times in a step; an engine does once.",
                          "Use another optimizer."),
    "torch.distributed.optim.ZeroRedundancyOptimizer": (
        "the strategy divides the optimizer's state.",
        "Use the plain optimizer, and set shard_optimizer: true under the strategy ddp."),
    "torch.distributed.algorithms.join.Join": ("ranks run different numbers of steps.",
                                               "Use a DistributedSampler, which pads."),
}  # fmt: skip


# Packages that do parts of the training themselves.
_TRAINERS = ("apex", "bmtrain", "fairscale", "ignite", "lightning", "megatron", "pytorch_lightning",
             "ray", "torch_xla", "torch.distributed.pipelining", "torch.distributed.rpc",
             "torch.distributed.tensor")  # fmt: skip


def refuse_around(plan: Plan) -> None:
    """Note everything in a program that goes around the engine."""
    refuse_names(plan)
    _refuse_methods(plan)


def refuse_names(plan: Plan) -> None:
    """Note the functions and packages that do parts of the training themselves."""
    for name, (why, todo) in REFUSED.items():
        for _, call in plan.calls(name):
            if call not in plan.handled:
                plan.refuse(call, why, todo)
    _refuse_imports(plan)


def _refuse_imports(plan: Plan) -> None:
    for source in plan.sources:
        for node in source.all(cst.ImportFrom):
            if isinstance(node.names, cst.ImportStar):
                plan.refuse(node, "it hides what names mean.", "Import the names that are used.")
        for node in (*source.all(cst.Import), *source.all(cst.ImportFrom)):
            for name in imported(node):
                if any(f"{name}.".startswith(one) if one[-1] == "." else name == one
                       for one in plan.understood):  # fmt: skip
                    continue
                if any(f"{name}.".startswith(f"{package}.") for package in _TRAINERS):
                    plan.refuse(
                        node,
                        "it takes part in training in ways that are not followed.",
                        _BY_HAND,
                    )


def _refuse_methods(plan: Plan) -> None:
    from torch import nn

    known = set(dir(nn.Module)) | {"module", "no_sync"}
    training = {
        next(iter(source.loops(call)), source.function(call))
        for source, call, _ in plan.methods("backward")
    }
    for source in plan.sources:
        for call in source.calls():
            told = call in plan.handled or call in plan.losses or call in plan.clips
            if told or training.isdisjoint([*source.loops(call), source.function(call)]):
                continue
            attribute = call.func
            name = getattr(getattr(attribute, "attr", None), "value", None)
            base = getattr(attribute, "value", None)
            if name is not None and plan.flow.values(base) & plan.models:
                if name == "forward" or name not in known:
                    plan.refuse(
                        call,
                        "this method of the model goes around the engine's forward pass.",
                        "Let the module's forward do it, and call model(...).",
                    )
                continue
            if plan.flow.functions(attribute) or not _is_foreign(plan, attribute):
                continue
            if any(plan.flow.values(one.value) & plan.models for one in call.args):
                plan.refuse(
                    call,
                    "the model is given to code that is not seen, where the loss is computed.",
                    "Call the model as model(...) here.",
                )


def _is_foreign(plan: Plan, function: object) -> bool:
    names = plan.flow.names(function)  # pyright: ignore[reportArgumentType]
    harmless = {"len", "print", "isinstance", "hasattr", "getattr", "next", "str", "id", "type",
                "copy.deepcopy", "sum", "dict", "iter"}  # fmt: skip
    if names & harmless or any(one.endswith(WRAPPERS) for one in names):
        return False
    made = plan.flow.values(function)  # pyright: ignore[reportArgumentType]
    return not made & plan.models and not any(one.kind == "class" for one in made)
