"""``deepspeed.comm``: the collectives of ``torch.distributed``, over the run's processes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from unipar.compat.deepspeed_names import COMM
from unipar.compat.run import current


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the other processes. Collective.

    Where this one stands is found in its environment, and the run's ``device`` decides how they
    meet, whatever the arguments say.

    Args:
        timeout: how long a collective waits for a rank.
    """
    current.placement(timeout=timeout)
    current.world()


def is_initialized() -> bool:
    """Return whether the processes are joined."""
    return dist.is_initialized()


def get_rank(group: Any = None) -> int:
    """This process's rank."""
    return current.placement().rank if group is None else dist.get_rank(group)


def get_world_size(group: Any = None) -> int:
    """How many processes there are."""
    return current.placement().size if group is None else dist.get_world_size(group)


def get_local_rank() -> int:
    """This process's rank among those of its node."""
    return current.placement().local_rank


def get_world_group() -> Any:
    """The group of all processes."""
    current.world()
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """The ranks of a group."""
    return dist.get_process_group_ranks(group if group is not None else get_world_group())


def configure(*args: Any, **kwargs: Any) -> None:
    """Nothing: it is of DeepSpeed's logs."""


log_summary = reset_log = configure

_OTHERWISE = {"inference_all_reduce": "all_reduce"}


def _torchs(name: str) -> Any:
    """A function of torch's, which the processes join for; its classes as they are."""
    row = COMM.find(name)
    there = getattr(dist, _OTHERWISE.get(name, name), None)
    if row is None or row.fate != "kept" or there is None or isinstance(there, type):
        return there if row is not None and row.fate == "kept" else None

    def call(*args: Any, **kwargs: Any) -> Any:
        # One process needs no group for anything else, but for this.
        current.world()
        return there(*args, **kwargs)

    return there if name in ("ReduceOp", "is_available", "destroy_process_group") else call


__getattr__ = COMM.refusing(__name__, _torchs)
