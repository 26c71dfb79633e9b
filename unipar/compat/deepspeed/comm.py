"""``deepspeed.comm``: the collectives of ``torch.distributed``, over the run's processes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
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


def all_gather_coalesced(
    output_tensors: Sequence[torch.Tensor],
    input_tensors: Sequence[torch.Tensor],
    group: Any = None,
    async_op: bool = False,
) -> torch.futures.Future[Any] | None:
    """Gather several tensors at once. Collective.

    Args:
        output_tensors: for each, one of the tensors of all ranks, one behind the other.
        input_tensors: this rank's.
        group: of the ranks.
        async_op: whether to return at once.

    Returns:
        What can be waited for, with ``async_op``.
    """
    current.world()
    pairs = zip(output_tensors, input_tensors, strict=True)
    works = [dist.all_gather_into_tensor(*pair, group=group, async_op=True) for pair in pairs]
    whole = torch.futures.collect_all([one.get_future() for one in works if one is not None])
    if async_op:
        return whole
    whole.wait()
    return None


class P2POp(dist.P2POp):
    """torch's, of an ``isend`` or ``irecv`` that is found here."""

    def __new__(cls, op: Any, *args: Any, **kwargs: Any) -> P2POp:
        return super().__new__(cls, getattr(dist, op.__name__), *args, **kwargs)

    def __init__(self, op: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(getattr(dist, op.__name__), *args, **kwargs)


_OTHERWISE = {"inference_all_reduce": "all_reduce"}
_ARGUMENTS = {
    "all_gather_into_tensor": {"tensor": "input_tensor"},
    "reduce_scatter_tensor": {"output_tensor": "output", "tensor": "input"},
    "all_to_all_single": {"tensor": "input"},
}
"""What torch calls arguments whose names are others in DeepSpeed."""
_LOGGED = ("prof", "log_name", "debug")
"""Arguments of DeepSpeed's logs, which each of its functions has."""


@functools.cache
def _torchs(name: str) -> Any:
    """A function of torch's, which the processes join for; its classes as they are."""
    row = COMM.find(name)
    there = getattr(dist, _OTHERWISE.get(name, name), None)
    if row is None or row.fate != "kept" or there is None or isinstance(there, type):
        return there if row is not None and row.fate == "kept" else None
    named = _ARGUMENTS.get(name, {})

    @functools.wraps(there)
    def call(*args: Any, **kwargs: Any) -> Any:
        # One process needs no group for anything else, but for this.
        current.world()
        given = {named.get(key, key): one for key, one in kwargs.items() if key not in _LOGGED}
        return there(*args, **given)

    return there if name in ("ReduceOp", "is_available", "destroy_process_group") else call


__getattr__ = COMM.refusing(__name__, _torchs)
