"""What ranks of a ``Fabric`` know of each other, and give each other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.nn import functional as differentiable

from unipar.compat.fabric.settings import Asked
from unipar.compat.fabric_names import refuse
from unipar.compat.run import current
from unipar.data.move import with_items


class Exchange:
    """What does not need the others until it is a collective; the first of those joins them."""

    _asked: Asked

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return current.device()

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return current.placement().rank

    @property
    def local_rank(self) -> int:
        """This process's rank among those of its node."""
        return current.placement().local_rank

    @property
    def node_rank(self) -> int:
        """Which node this is."""
        return current.placement().node_rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return current.placement().size

    @property
    def is_global_zero(self) -> bool:
        """Whether this is rank 0."""
        return self.global_rank == 0

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` in the first process of each node."""
        if self.local_rank == 0:
            print(*args, **kwargs)

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank is here. Collective."""
        current.world().barrier()

    @contextlib.contextmanager
    def rank_zero_first(self, local: bool = False) -> Iterator[None]:
        """The others wait until rank 0 (of each node) has left the block. Collective."""
        first = (self.local_rank if local else self.global_rank) == 0
        # What comes first, such as a download, may take longer than the run's timeout.
        with _patient_barrier() as barrier:
            if not first:
                barrier()
            yield
            if first:
                barrier()
            barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """One rank's value on every rank. Collective."""
        held = [obj]
        if current.world().size > 1:
            dist.broadcast_object_list(held, src=src)
        return held[0]

    def all_gather(self, data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Every rank's tensors, behind a new first dimension of ranks. Collective.

        On one rank they are as they are, unless the script names a strategy: Fabric's then has the
        dimension, too.

        Args:
            data: tensors and numbers, in collections of any depth; of the same shapes everywhere.
            group: nothing: all ranks.
            sync_grads: whether gradients go back to the ranks that the tensors are of.
        """
        if group is not None:
            refuse("Fabric.all_gather(group=…)")
        size = current.world().size

        def one(tensor: torch.Tensor) -> torch.Tensor:
            if size == 1 and not self._asked.names_strategy:
                return tensor
            own = tensor if sync_grads else tensor.detach()
            if size == 1:
                return torch.stack([own])
            own = own.contiguous()
            if sync_grads:
                return torch.stack(differentiable.all_gather(own))
            parts = [torch.empty_like(own) for _ in range(size)]
            dist.all_gather(parts, own)
            return torch.stack(parts)

        return _changed(data, one, self.device)

    def all_reduce(self, data: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Tensors reduced over ranks, in place; numbers become tensors. Collective.

        Args:
            data: as for :meth:`all_gather`.
            group: nothing: all ranks.
            reduce_op: ``mean``, ``sum`` or another of ``torch.distributed.ReduceOp``.
        """
        if group is not None:
            refuse("Fabric.all_reduce(group=…)")
        size = current.world().size
        means = str(reduce_op).lower() in ("mean", "avg")
        named = dist.ReduceOp.SUM if means else reduce_op
        op = getattr(dist.ReduceOp, named.upper()) if isinstance(named, str) else named

        def one(tensor: torch.Tensor) -> torch.Tensor:
            if size == 1:
                return tensor
            dist.all_reduce(tensor, op)
            return tensor.copy_(tensor / size) if means else tensor

        return _changed(data, one, self.device)


@contextlib.contextmanager
def _patient_barrier() -> Iterator[Callable[[], Any]]:
    """A barrier at which ranks wait for each other however long that takes. Collective."""
    if current.world().size == 1:
        yield lambda: None
        return
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(days=10_000))
    try:
        yield lambda: dist.barrier(group=group)
    finally:
        dist.destroy_process_group(group)


def _changed(
    data: Any, change: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> Any:
    """What is given, with the tensors and numbers in it changed."""
    tensor = _tensor(data, device)
    if isinstance(tensor, torch.Tensor):
        return change(tensor)
    return with_items(data, lambda one: _changed(one, change, device))


def _tensor(value: Any, device: torch.device) -> Any:
    if isinstance(value, bool):
        return torch.tensor(value, dtype=torch.uint8, device=device)
    if isinstance(value, (int, float)):
        return torch.tensor(value, device=device)
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    return value.to(device) if isinstance(value, torch.Tensor) else value
