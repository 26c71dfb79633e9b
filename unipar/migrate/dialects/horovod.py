"""Horovod with PyTorch: ``horovod.torch``."""

from __future__ import annotations

from typing import Any, ClassVar

import libcst as cst

from unipar.migrate.clipping import CLIP
from unipar.migrate.devices import rewrite_environment
from unipar.migrate.dialects.base import Dialect, Row
from unipar.migrate.dialects.horovod_compression import rewrite_compression
from unipar.migrate.dialects.horovod_exchange import rewrite_exchange
from unipar.migrate.dialects.torch import LOOP_REFUSED, LOOP_ROWS, check_trains, rewrite_training
from unipar.migrate.leftovers import Leftovers
from unipar.migrate.literals import argument, constant
from unipar.migrate.loaders import rewrite_samplers
from unipar.migrate.models import find_optimizers, optimizers_of
from unipar.migrate.numerics import warn_of_ranks
from unipar.migrate.plan import Plan
from unipar.migrate.processes import is_conditional
from unipar.migrate.source import Source

_HVD = "horovod.torch."
_CALLS = {
    "init": "script.open()",
    "shutdown": "script.close()",
    "size": "script.world().size",
    "rank": "script.world().rank",
    "local_rank": "script.placement().local_rank",
    "local_size": "script.placement().local_size",
    "cross_rank": "script.placement().node_rank",
    "cross_size": "script.placement().num_nodes",
    "barrier": "script.world().barrier()",
}
_ARGUMENTS = ("optimizer", "named_parameters", "compression", "backward_passes_per_step", "op",
              "gradient_predivide_factor", "num_groups", "groups", "sparse_as_dense",
              "process_set")  # fmt: skip
_DROPPED = ("optimizer", "named_parameters", "backward_passes_per_step")
_OPTIONS = ("gradient_predivide_factor", "num_groups", "groups", "sparse_as_dense")
_REFUSED = {
    "elastic.": (
        "the number of ranks may change while it runs, for which the loop is written.",
        "Write checkpoints, load the newest at the start, and restart the script when a rank is "
        "lost: torchrun --max-restarts 3.",
    ),
    "SyncBatchNorm": ("the strategy converts the model.",
                      "Leave it out, and set sync_batchnorm: true under the strategy ddp."),
    "join": ("ranks run different numbers of steps.", "Use a DistributedSampler, which pads."),
}  # fmt: skip
_OWN = ("this is Horovod's own, and has no counterpart under other strategies.",
        "Leave it out, or do it with torch.distributed, which any strategy has.")  # fmt: skip


class Horovod(Dialect):
    """A script whose optimizer is wrapped in ``hvd.DistributedOptimizer``."""

    name: ClassVar[str] = "horovod"
    title: ClassVar[str] = "Horovod"
    marks: ClassVar[tuple[str, ...]] = ("horovod.",)
    rows: ClassVar[tuple[Row, ...]] = (
        Row("hvd.init(), hvd.shutdown()", "script.open(), script.close()"),
        Row("hvd.size(), hvd.rank()", "script.world().size, script.world().rank"),
        Row("hvd.local_rank()", "script.placement().local_rank"),
        Row("hvd.DistributedOptimizer(optimizer, ...)",
            "the optimizer; its options go to unipar.yaml"),
        Row("compression=hvd.Compression.fp16", "compression: fp16 in unipar.yaml"),
        Row("backward_passes_per_step=4", "removed: a step is on all passes since the last one"),
        Row("hvd.broadcast_parameters(model.state_dict(), root_rank=0)",
            "script.broadcast_weights(model), or removed in front of the optimizer, where "
            "script.prepare does it"),
        Row("hvd.broadcast_optimizer_state(optimizer, root_rank=0)",
            "script.broadcast_optimizer(optimizer)"),
        Row("hvd.broadcast_object(x), hvd.broadcast(t, 0)", "script.world().broadcast(x)"),
        Row("hvd.allreduce(t, name=\"loss\", op=hvd.Sum)", "script.all_reduce(t, \"sum\")"),
        Row("hvd.allgather(t), hvd.allgather_object(x)",
            "script.all_gather(t), script.world().gather(x)"),
        Row("optimizer.synchronize()", "removed: the engine's step does it"),
        Row("with optimizer.skip_synchronize(): optimizer.step()",
            "script.engine(optimizer).step()"),
        Row("DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())",
            "DistributedSampler(data, num_replicas=script.world().data_size, "
            "rank=script.world().data_rank)"),
        Row("torch.cuda.set_device(hvd.local_rank())", "removed: the run has done it"),
        *LOOP_ROWS,
    )  # fmt: skip

    refused: ClassVar[tuple[Row, ...]] = (
        Row("op=hvd.Adasum", "It is another update than that by the average."),
        Row("op=hvd.Sum", "Strategies average. Leave it out, and multiply the loss by hvd.size()."),
        Row("hvd.elastic.run, TorchState",
            "Write checkpoints, and restart with torchrun --max-restarts."),
        Row("hvd.join()", "Ranks run different numbers of steps. Use a DistributedSampler."),
        Row("hvd.SyncBatchNorm", "Set sync_batchnorm: true under the strategy ddp."),
        Row("process_set=s", "Sets of ranks are for other divisions than data parallelism's."),
        Row("if n > 1: optimizer = hvd.DistributedOptimizer(optimizer)",
            "Wrap it always: without a launcher unipar runs one process just so."),
        Row("an optimizer that is not wrapped", "Its replicas drift apart. Wrap it."),
        Row("hvd.allreduce_async_, hvd.alltoall, hvd.nccl_built()",
            "They are Horovod's own. Leave them out, or use torch.distributed."),
        *LOOP_REFUSED,
    )  # fmt: skip

    def rewrite(self, plan: Plan) -> None:
        left = Leftovers(plan, "horovod")
        if left.refuse_without("hvd.init()", f"{_HVD}init"):
            return
        find_optimizers(plan)
        check_trains(plan)
        plan.launcher = "horovodrun"
        rewrite_samplers(plan)
        self._rewrite_places(plan, left)
        self._rewrite_optimizers(plan, left)
        _drop_synchronizing(plan)
        rewrite_exchange(plan, left)
        rewrite_training(plan, wrapped=False)
        rewrite_environment(plan)
        warn_of_ranks(plan)
        if plan.config.get("device") != "cpu":
            for _, call in plan.calls(f"{_HVD}init"):
                plan.tell(
                    call,
                    "the strategy horovod trains on CPUs.",
                    "On GPUs set strategy: ddp in unipar.yaml, which averages gradients likewise.",
                )
        for name, (why, todo) in _REFUSED.items():
            left.refuse_below(f"{_HVD}{name}", why, todo)
        left.refuse(*_OWN)
        left.remove_imports()

    def _rewrite_places(self, plan: Plan, left: Leftovers) -> None:
        for name, text in _CALLS.items():
            for source, call in plan.calls(f"{_HVD}{name}"):
                if name == "init":
                    self._check_init(plan, source, call)
                if name == "shutdown" and source.statement(call) is None:
                    continue
                plan.replace(call, text)
                left.settle(call)

    def _check_init(self, plan: Plan, source: Source, call: cst.Call) -> None:
        if is_conditional(source, call):
            plan.refuse(
                call,
                "whether the run is distributed is decided while it runs.",
                "Call it always: without a launcher unipar runs one process just so.",
            )
        if call.args:
            plan.refuse(
                call, "sets of ranks are for other divisions than data parallelism's.",
                "Leave its arguments out.",
            )  # fmt: skip

    def _rewrite_optimizers(self, plan: Plan, left: Leftovers) -> None:
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
                    self._take(plan, left, options, call, name, one.value)
            left.settle(call.func)
            self._check_state(plan, source, call, inner)
            assign = source.parent(call)
            if isinstance(assign, cst.Assign) and [
                source.code(one.target) for one in assign.targets
            ] == [source.code(inner)]:
                source.remove(assign)
            else:
                plan.replace(call, inner)
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
        self, plan: Plan, left: Leftovers, options: dict[str, Any], call: cst.Call, name: str,
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
                "Leave op out, and look for a learning rate that suits the average." if adasum
                else "Leave op out; for hvd.Sum multiply the loss by hvd.size().",
            )  # fmt: skip
        elif name in _OPTIONS and isinstance(literal, (int, float)):
            options["num_groups" if name == "groups" else name] = literal
        elif name not in (*_DROPPED, "op") and source.code(value) != "None":
            plan.refuse(
                call, f"unipar.yaml cannot say `{name}={source.code(value)}`.",
                f"Leave {name} out, or give a literal to one of {', '.join(_OPTIONS)}.",
            )  # fmt: skip

    def _check_state(
        self, plan: Plan, source: Source, call: cst.Call, inner: cst.BaseExpression
    ) -> None:
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


def _drop_synchronizing(plan: Plan) -> None:
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
