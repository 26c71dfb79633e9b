"""Functions that scripts take from ``lightning_fabric.utilities``, of whatever module there."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from unipar.compat.fabric.ranks import (
    rank_zero_debug,
    rank_zero_deprecation,
    rank_zero_info,
    rank_zero_only,
    rank_zero_warn,
)
from unipar.compat.fabric.seeding import pl_worker_init_function, reset_seed, seed_everything
from unipar.compat.fabric.throughput import Throughput, ThroughputMonitor
from unipar.compat.fabric_names import UTILITIES
from unipar.compat.run import current
from unipar.data import move_to
from unipar.utils.urls import is_url

__all__ = [
    "AttributeDict", "Throughput", "ThroughputMonitor", "disable_possible_user_warnings",
    "is_shared_filesystem", "measure_flops", "move_data_to_device", "pl_worker_init_function",
    "rank_zero_debug", "rank_zero_deprecation", "rank_zero_info", "rank_zero_only",
    "rank_zero_warn", "reset_seed", "seed_everything", "suggested_max_num_workers",
]  # fmt: skip


class AttributeDict(dict[str, Any]):
    """A dictionary whose entries are attributes as well."""

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError as error:
            raise AttributeError(f"there is no attribute '{key}'") from error

    def __setattr__(self, key: str, val: Any) -> None:
        self[key] = val

    def __delattr__(self, item: str) -> None:
        if item not in self:
            raise AttributeError(item)
        del self[item]


def move_data_to_device(batch: Any, device: Any) -> Any:
    """Tensors on a device, whatever holds them."""
    return move_to(batch, torch.empty((), device=device).device)


def is_shared_filesystem(strategy: Any = None, path: Any = None, timeout: int = 3) -> bool:
    """Whether every rank sees what rank 0 writes. Collective.

    Args:
        strategy: as in Fabric; all ranks are asked, whatever it is.
        path: a directory, or a file in one; left out: the working directory.
        timeout: seconds until a file that is not seen is taken for one that is not there.

    Raises:
        FileNotFoundError: a rank has no such path.
    """
    world = current.world()
    if is_url(path) or world.size == 1:
        return True
    where = Path(path or "").resolve()
    if len({*world.gather(where)}) > 1:
        return False
    if not all(world.gather(where.exists())):
        raise FileNotFoundError(f"not every rank has {where}")
    folder = where.parent if where.is_file() else where
    file = folder / f".seen-by-all-{world.gather(uuid4().hex)[0]}"
    if world.is_main:
        file.touch()
    world.barrier()
    ends = time.monotonic() + timeout
    while not file.exists() and time.monotonic() < ends:
        time.sleep(0.01)
    seen = all(world.gather(file.exists()))
    if world.is_main:
        file.unlink()
    return seen


def suggested_max_num_workers(local_world_size: int) -> int:
    """How many workers each process of this node may have, with a core for itself left."""
    if local_world_size < 1:
        raise ValueError(f"local_world_size is {local_world_size}, and there is one at least")
    return max(1, len(os.sched_getaffinity(0)) // local_world_size - 1)


def measure_flops(
    model: nn.Module,
    forward_fn: Callable[[], torch.Tensor],
    loss_fn: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> int:
    """Floating point operations of a forward pass, and of a backward pass if there is a loss."""
    with FlopCounterMode(display=False) as counter:
        output = forward_fn()
        if loss_fn is not None:
            loss_fn(output).backward()
    return counter.get_total_flops()


def disable_possible_user_warnings(module: str = "") -> None:
    """Nothing: Fabric's warnings are not given here."""


__getattr__ = UTILITIES.refusing(__name__)
