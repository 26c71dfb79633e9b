"""Horovod with PyTorch: ``horovod.torch``."""

from __future__ import annotations

from typing import ClassVar

import libcst as cst

from unipar.migrate.devices import rewrite_environment
from unipar.migrate.dialects.base import Dialect, Row
from unipar.migrate.dialects.horovod_exchange import rewrite_exchange
from unipar.migrate.dialects.horovod_optimizers import drop_synchronizing, rewrite_optimizers
from unipar.migrate.dialects.torch import LOOP_REFUSED, LOOP_ROWS, check_trains, rewrite_training
from unipar.migrate.leftovers import Leftovers
from unipar.migrate.loaders import rewrite_samplers
from unipar.migrate.models import find_optimizers
from unipar.migrate.numerics import warn_of_ranks
from unipar.migrate.plan import Plan
from unipar.migrate.processes import is_conditional
from unipar.migrate.source import Source

_HVD = "horovod.torch."
_LAUNCHERS = ("horovod.run", "horovod.runner.run", "horovod.spark.run")
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
_LAUNCH = (
    "Horovod starts the processes, of a function.",
    "Call the function itself, and start the script with torchrun or horovodrun.",
)
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
        Row("horovod.run(train, np=4)",
            "Horovod starts the processes. Call train(); start the script with torchrun."),
        Row("process_set=s", "Sets of ranks are for other divisions than data parallelism's."),
        Row("if n > 1: optimizer = hvd.DistributedOptimizer(optimizer)",
            "Wrap it always: without a launcher unipar runs one process just so."),
        Row("hvd_opt = hvd.DistributedOptimizer(opt); opt.step()",
            "It does not wait for the averages. Step hvd_opt."),
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
        rewrite_optimizers(plan, left)
        drop_synchronizing(plan)
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
        for name in _LAUNCHERS:
            left.refuse_below(name, *_LAUNCH)
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
