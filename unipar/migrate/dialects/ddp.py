"""DistributedDataParallel by hand."""

from __future__ import annotations

from typing import Any, ClassVar

import libcst as cst

from unipar.migrate.devices import rewrite_environment
from unipar.migrate.dialects.base import Dialect, Row
from unipar.migrate.dialects.torch import LOOP_REFUSED, LOOP_ROWS, check_trains, rewrite_training
from unipar.migrate.literals import argument, constant
from unipar.migrate.loaders import rewrite_samplers
from unipar.migrate.models import DDP, find_optimizers, holds_wrapper
from unipar.migrate.numerics import warn_of_ranks
from unipar.migrate.plan import Plan
from unipar.migrate.processes import (
    INIT,
    check_condition,
    refuse_groups,
    rewrite_group,
    rewrite_spawn,
)
from unipar.migrate.source import Source

_OPTIONS = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view", "bucket_cap_mb",
            "broadcast_buffers")  # fmt: skip
_DROPPED = ("device_ids", "output_device")


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
        Row("with ddp.no_sync():", "with script.no_sync():"),
        Row("int(os.environ[\"LOCAL_RANK\"])", "script.placement().local_rank"),
        Row("torch.cuda.set_device(rank)", "removed: the run has done it"),
        Row("DistributedSampler(data, num_replicas=n, rank=r)",
            "DistributedSampler(data, num_replicas=script.world().data_size, "
            "rank=script.world().data_rank)"),
        Row("mp.spawn(main, args=(n,), nprocs=n)", "script.spawn(main, args=(n,), nprocs=n)"),
        Row("dist.barrier(), dist.all_reduce(t), dist.get_rank(), if rank == 0:", "unchanged"),
        *LOOP_ROWS,
    )  # fmt: skip

    refused: ClassVar[tuple[Row, ...]] = (
        Row("if rank > 0: init_process_group()", "Only some ranks come to it. Call it always."),
        Row("init_process_group(init_method=\"tcp://...\", rank=args.rank)",
            "Start the processes with torchrun, srun or mpirun."),
        Row("dist.new_group, DDP(process_group=g)",
            "Groups of ranks are for other divisions than data parallelism's."),
        Row("register_comm_hook, join, require_backward_grad_sync", "These are DDP's own."),
        Row("a trained model that is not wrapped", "Its replicas drift apart. Wrap it."),
        Row("multiprocessing.Process(target=train)", "Use torchrun, or mp.spawn."),
        *LOOP_REFUSED,
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

    def _rewrite_wrappers(self, plan: Plan) -> None:
        options: dict[str, Any] = {}
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
            assign = source.parent(call)
            if isinstance(assign, cst.Assign) and [
                source.code(one.target) for one in assign.targets
            ] == [source.code(model)]:
                source.remove(assign)
            else:
                plan.replace(call, model)
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
        elif node.attr.value in ("register_comm_hook", "join", "require_backward_grad_sync"):
            plan.refuse(
                node, "this is DDP's own; an engine has none.",
                "Set the strategy's `compression`, or leave it out.",
            )  # fmt: skip
        elif node.attr.value in ("state_dict", "load_state_dict"):
            inner = isinstance(node.value, cst.Attribute) and node.value.attr.value == "module"
            if not inner:
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
