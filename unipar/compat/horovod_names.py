"""What becomes of Horovod's names; the tests and the page go by these tables."""

from __future__ import annotations

from unipar.compat.tables import Row, Table

_SETS = "Sets of ranks are for other divisions than data parallelism's. Leave them out."
_OWN = "It is a part of Horovod's own machinery. Leave it out."

STARTED = (
    "Horovod starts the processes, of a function.",
    "Call the function itself, and start the script with torchrun or horovodrun.",
)
PACKAGE = Table(
    "horovod",
    Row("torch", "kept"),
    Row("run run_elastic", "refused", " ".join(STARTED)),
)
HOROVOD = Table(
    "horovod.torch",
    Row(
        "Average Compression DistributedOptimizer HorovodInternalError Max Min Product Sum "
        "allgather allgather_async allgather_object allreduce allreduce_ allreduce_async "
        "allreduce_async_ barrier broadcast broadcast_ broadcast_async broadcast_async_ "
        "broadcast_object broadcast_optimizer_state broadcast_parameters cross_rank cross_size "
        "elastic global_process_set grouped_allgather grouped_allreduce grouped_allreduce_ init "
        "is_initialized join local_rank local_size poll rank shutdown size synchronize",
        "kept",
    ),
    Row("*_built *_enabled mpi_threads_supported mpi_lib_v2", "kept"),
    Row("start_timeline stop_timeline", "ignored", "Use torch.profiler, which any strategy has."),
    Row(
        "Adasum", "refused",
        "It is another update than that by the average, and no other strategy has it. Use "
        "hvd.Average.",
    ),
    Row("ProcessSet add_process_set remove_process_set", "refused", _SETS),
    Row(
        "SyncBatchNorm sync_batch_norm", "refused",
        "Use torch.nn.SyncBatchNorm.convert_sync_batchnorm(model).",
    ),
    Row(
        "alltoall* *reducescatter* sparse_allreduce_async grouped_allgather_async "
        "grouped_allreduce_async grouped_allreduce_async_",
        "refused", "Use torch.distributed, whose collectives go on working under any strategy.",
    ),
    Row("check_extension compression functions mpi_ops optimizer", "refused", _OWN),
)  # fmt: skip

CALLS = Table(
    "calls",
    Row("DistributedOptimizer(op=hvd.Adasum) allreduce(op=hvd.Adasum)", "refused",
        "It is another update than that by the average. Use hvd.Average."),
    Row("DistributedOptimizer(compression=…)", "refused",
        "No strategy compresses gradients by a script's own class. Use hvd.Compression.fp16 or "
        "none, or set compression of the strategy ddp in unipar.yaml."),
    Row("process_set=…", "refused", _SETS),
    Row("join()", "refused",
        "On several ranks: they would run different numbers of steps, and an engine's steps are of "
        "all ranks. Use a DistributedSampler, which pads."),
    Row("elastic.TorchState.restore()", "refused",
        "Nothing is kept in memory, since ranks neither come nor go. Save what the run may go back "
        "to, and load it: model.load_state_dict(…), optimizer.load_state_dict(…)."),
    Row("DistributedOptimizer(groups=…,num_groups=…,gradient_predivide_factor=…)", "ignored",
        "They say how gradients travel, and not what is computed."),
    Row("elastic.run(train)(state)", "kept",
        "The number of ranks stays as it is; state.commit() keeps nothing. Where a rank is lost "
        "the run ends: restart it with torchrun --max-restarts, and load what save_state wrote."),
)  # fmt: skip

TABLES = (HOROVOD, CALLS)
