"""DistributedDataParallel by hand."""

from __future__ import annotations

from typing import Any, ClassVar

import libcst as cst

from unipar.migrate.devices import rewrite_environment
from unipar.migrate.dialects.base import Dialect, Row
from unipar.migrate.dialects.torch import (
    LOOP_REFUSED,
    LOOP_ROWS,
    NORM_ROW,
    check_trains,
    rewrite_training,
)
from unipar.migrate.history import writes_before
from unipar.migrate.literals import argument, constant
from unipar.migrate.loaders import rewrite_samplers
from unipar.migrate.models import DDP, find_optimizers, holds_wrapper
from unipar.migrate.numerics import warn_of_ranks
from unipar.migrate.plan import Plan
from unipar.migrate.processes import (
    INIT,
    check_condition,
    is_conditional,
    refuse_groups,
    rewrite_group,
    rewrite_spawn,
)
from unipar.migrate.refusals import SYNC_BATCHNORM
from unipar.migrate.source import Source

_OPTIONS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb",
            "broadcast_buffers")  # fmt: skip
_DROPPED = ("device_ids", "output_device")
_STATES = ("state_dict", "load_state_dict")
# What DDP has and the module in it has not.
_OWN = ("register_comm_hook", "join", "require_backward_grad_sync", "require_forward_param_sync",
        "reducer", "logger", "process_group", "device_ids", "output_device", "static_graph",
        "_set_static_graph", "will_sync_module_buffers", "find_unused_parameters",
        "broadcast_buffers")  # fmt: skip


class Ddp(Dialect):
    """A script that wraps its model in DistributedDataParallel."""

    name: ClassVar[str] = "ddp"
    title: ClassVar[str] = "DistributedDataParallel"
    marks: ClassVar[tuple[str, ...]] = (*INIT, *DDP)
    rows: ClassVar[tuple[Row, ...]] = (
        Row("dist.init_process_group(...)", "script.open()"),
        Row("dist.destroy_process_group()", "script.close()"),
        Row("DDP(model, device_ids=[rank])", "model; its options go to unipar.yaml"),
        Row("if distributed: ...",
            "unchanged; without a launcher unipar runs one process just so"),
        Row("ddp.module", "model: it is not wrapped"),
        Row("ddp.device", "script.device()"),
        Row("with ddp.no_sync():", "with script.no_sync():"),
        Row("ddp.require_backward_grad_sync = last",
            "removed: an engine knows when to reduce"),
        Row("SyncBatchNorm.convert_sync_batchnorm(model)",
            "model, and sync_batchnorm: true under the strategy ddp"),
        Row("int(os.environ[\"LOCAL_RANK\"])", "script.placement().local_rank"),
        Row("torch.cuda.set_device(rank)", "removed: the run has done it"),
        Row("DistributedSampler(data, num_replicas=n, rank=r)",
            "DistributedSampler(data, num_replicas=script.world().data_size, "
            "rank=script.world().data_rank)"),
        Row("mp.spawn(main, args=(n,), nprocs=n)", "script.spawn(main, args=(n,), nprocs=n)"),
        Row("dist.barrier(), dist.all_reduce(t), dist.get_rank(), if rank == 0:", "unchanged"),
        Row("if rank == 0: evaluate(model)",
            "unchanged, and noted: a strategy that divides weights needs all ranks for it"),
        *LOOP_ROWS,
        NORM_ROW,
    )  # fmt: skip

    refused: ClassVar[tuple[Row, ...]] = (
        Row("if rank > 0: init_process_group()", "Only some ranks come to it. Call it always."),
        Row("init_process_group(init_method=\"tcp://...\", rank=args.rank)",
            "Start the processes with torchrun, srun or mpirun."),
        Row("dist.new_group, DDP(process_group=g)",
            "Groups of ranks are for other divisions than data parallelism's."),
        Row("register_comm_hook, join, reducer, process_group", "These are DDP's own."),
        Row("a trained model that is not wrapped", "Its replicas drift apart. Wrap it."),
        Row("multiprocessing.Process(target=train)", "Use torchrun, or mp.spawn."),
        Row("if args.sync_bn: convert_sync_batchnorm(model)",
            "Decided while it runs. Leave it out, and set sync_batchnorm: true under the strategy "
            "ddp."),
        *(row for row in LOOP_REFUSED if row.before != SYNC_BATCHNORM),
    )  # fmt: skip

    def rewrite(self, plan: Plan) -> None:
        find_optimizers(plan)
        check_trains(plan)
        plan.config["strategy"] = "ddp"
        spawned = rewrite_spawn(plan)
        plan.launcher = "python" if spawned else "torchrun"
        joined = rewrite_group(plan, spawned=spawned)
        for _, call in () if joined else plan.calls(*DDP)[:1]:
            plan.refuse(
                call, "no init_process_group is seen.", "Give migrate the file that calls it too."
            )
        for _, call in plan.calls("torch.distributed.init_device_mesh"):
            refuse_groups(plan, call)
        self._rewrite_wrappers(plan)
        rewrite_training(plan, wrapped=True)
        rewrite_environment(plan)
        rewrite_samplers(plan)
        warn_of_ranks(plan)

    def _convert_batchnorm(self, plan: Plan) -> dict[str, Any]:
        """Leave the converting of batch norms to the strategy, and give its option for it."""
        options: dict[str, Any] = {}
        for source, call in plan.calls(SYNC_BATCHNORM):
            model = argument(call, 0, "module")
            if model is None or len(call.args) > 1 or is_conditional(source, call):
                continue
            options["sync_batchnorm"] = True
            plan.handled.add(call)
            _leave(plan, source, call, model)
        return options

    def _rewrite_wrappers(self, plan: Plan) -> None:
        options = self._convert_batchnorm(plan)
        for source, call in plan.calls(*DDP):
            model = argument(call, 0, "module")
            if model is None:
                plan.refuse(call, "it cannot be seen what it wraps.", "Name the model.")
                continue
            check_condition(plan, source, call)
            for one in call.args[1:]:
                name = one.keyword.value if one.keyword is not None else "device_ids"
                value = constant(one.value)
                if name in _OPTIONS and value is not None:
                    options[name] = value
                elif name not in (*_DROPPED, "module"):
                    plan.refuse(
                        call, f"unipar.yaml cannot say `{source.code(one)}`.",
                        f"Leave {name} out, or give a literal to one of {', '.join(_OPTIONS)}.",
                    )  # fmt: skip
            _leave(plan, source, call, model)
        if options:
            plan.config["strategy"] = {"name": "ddp", **options}
        for source in plan.sources:
            for node in source.all(cst.Attribute):
                self._rewrite_attribute(plan, source, node)
        for origin, model in plan.optimizers.items():
            if not holds_wrapper(plan.flow, model) and origin.node is not None:
                self._check_wrapped(plan, origin.node, model)

    def _rewrite_attribute(self, plan: Plan, source: Source, node: cst.Attribute) -> None:
        if not holds_wrapper(plan.flow, node.value):
            return
        if node.attr.value == "module":
            plan.replace(node, node.value)
        elif node.attr.value == "no_sync":
            plan.replace(node, "script.no_sync")
        elif node.attr.value == "require_backward_grad_sync" and isinstance(
            target := source.parent(node), cst.AssignTarget
        ):  # An engine knows by itself when gradients are to be reduced.
            assign = source.parent(target)
            assert isinstance(assign, cst.Assign)
            source.remove(assign)
        elif node.attr.value == "device" and _may_be_wrapper(plan, node.value):
            plan.replace(node, "script.device()")
        elif node.attr.value in _OWN and _may_be_wrapper(plan, node.value):
            plan.refuse(
                node, "this is DDP's own; an engine has none.",
                f"Leave it out; the strategy ddp has the options {', '.join(_OPTIONS)} and "
                "`compression`.",
            )  # fmt: skip
        elif node.attr.value in _STATES and _may_be_wrapper(plan, node.value):
            plan.tell(
                node,
                "the names in this state dict no longer begin with `module.`.",
                "Of files written before, strip it: {k.removeprefix('module.'): v ...}.",
            )

    def _check_wrapped(self, plan: Plan, node: cst.CSTNode, model: cst.CSTNode) -> None:
        owned = plan.flow.values(model)
        for _, call in plan.calls(*DDP):
            inner = argument(call, 0, "module")
            if inner is not None and plan.flow.values(inner) & owned:
                return
        plan.refuse(
            node,
            "its model is not wrapped in DDP, so its replicas drift apart.",
            "Wrap it, and let the engine keep the replicas equal.",
        )


def _leave(plan: Plan, source: Source, call: cst.Call, model: cst.BaseExpression) -> None:
    """Leave a model in place of the call that it is given to."""
    assign = source.parent(call)
    targets = assign.targets if isinstance(assign, cst.Assign) else ()
    if isinstance(assign, cst.Assign) and [source.code(one.target) for one in targets] == [
        source.code(model)
    ]:
        source.remove(assign)
    else:
        plan.replace(call, model)


def _may_be_wrapper(
    plan: Plan, node: cst.BaseExpression, within: tuple[cst.FunctionDef, ...] = ()
) -> bool:
    """Return whether an expression may be a wrapper, and not only the module in one.

    Args:
        plan: the program.
        node: the expression.
        within: functions of which it is what they give back.
    """
    source = plan.flow.source(node)
    parts: list[cst.BaseExpression] = []
    if isinstance(node, cst.Attribute) and node.attr.value == "module":
        return False
    if isinstance(node, cst.IfExp):
        branches = [(node.body, node.orelse), (node.orelse, node.body)]
        if any(source.code(a) == f"{source.code(b)}.module" for a, b in branches):
            return False
        parts = [node.body, node.orelse]
    elif isinstance(node, cst.Call):
        functions = [one for one in plan.flow.functions(node.func) if one not in within]
        within = (*within, *functions)
        parts = [one for function in functions for one in plan.flow.source(node).returned(function)]
    elif isinstance(node, (cst.Name, cst.Attribute)):
        parts = [one.value for one in writes_before(source, node)]
    if not parts:
        return holds_wrapper(plan.flow, node)
    return any(_may_be_wrapper(plan, one, within) for one in parts)
