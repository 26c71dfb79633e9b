"""The face of ``horovod.torch``."""

from __future__ import annotations

from typing import Any

from unipar.compat.horovod.torch import elastic
from unipar.compat.horovod.torch.calls import (
    Average,
    Compression,
    DistributedOptimizer,
    HorovodInternalError,
    Max,
    Min,
    Product,
    Sum,
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
    cross_rank,
    cross_size,
    global_process_set,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    init,
    is_initialized,
    join,
    local_rank,
    local_size,
    poll,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
    synchronize,
)
from unipar.compat.horovod_names import HOROVOD

__all__ = [
    "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max", "Min",
    "Product", "Sum", "allgather", "allgather_async", "allgather_object", "allreduce",
    "allreduce_", "allreduce_async", "allreduce_async_", "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "cross_rank", "cross_size", "elastic", "global_process_set",
    "grouped_allgather", "grouped_allreduce", "grouped_allreduce_", "init", "is_initialized",
    "join", "local_rank", "local_size", "poll", "rank", "shutdown", "size", "start_timeline",
    "stop_timeline", "synchronize",


]  # fmt: skip


def _asked_of_the_build(name: str) -> Any:
    """What Horovod is built with, of which there is nothing here but gloo."""
    if name.endswith(("_built", "_enabled")) or name in ("mpi_threads_supported", "mpi_lib_v2"):
        return lambda *args, **kwargs: name.startswith("gloo")
    return None


__getattr__ = HOROVOD.refusing(__name__, _asked_of_the_build)
