"""The identity of a process, in the words of ``colossalai.cluster``."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from unipar.compat.colossalai_names import CLUSTER
from unipar.compat.run import current

__all__ = ["DistCoordinator"]


class DistCoordinator:
    """Which process this is. Made on all ranks, after ``launch``."""

    def __init__(self) -> None:
        self._world = current.world()

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self._world.size

    @property
    def local_rank(self) -> int:
        """This process's rank on its node."""
        return self._world.local_rank

    def is_master(self, process_group: Any = None) -> bool:
        """Whether this is rank 0, of a group."""
        return self._rank(process_group) == 0

    def is_node_master(self) -> bool:
        """Whether this is the first process of its node."""
        return self.local_rank == 0

    def is_last_process(self, process_group: Any = None) -> bool:
        """Whether this is the last rank, of a group."""
        size = self.world_size if process_group is None else dist.get_world_size(process_group)
        return self._rank(process_group) == size - 1

    def print_on_master(self, msg: str, process_group: Any = None) -> None:
        """Print on rank 0, of a group."""
        if self.is_master(process_group):
            print(msg)

    def print_on_node_master(self, msg: str) -> None:
        """Print in the first process of each node."""
        if self.is_node_master():
            print(msg)

    @contextlib.contextmanager
    def priority_execution(
        self, executor_rank: int = 0, process_group: Any = None
    ) -> Iterator[None]:
        """A block that one rank of a group has left before the others enter it. Collective."""
        first = self._rank(process_group) == executor_rank
        if not first:
            self.block_all(process_group)
        yield
        if first:
            self.block_all(process_group)

    def destroy(self, process_group: Any = None) -> None:
        """End the run, or let go of a group."""
        if process_group is None:
            current.close()
        else:
            dist.destroy_process_group(process_group)

    def block_all(self, process_group: Any = None) -> None:
        """Wait until every rank is here, of a group. Collective."""
        if process_group is None:
            self._world.barrier()
        else:
            dist.barrier(process_group)

    def on_master_only(self, process_group: Any = None) -> Callable[..., Callable[..., Any]]:
        """Decorator: the function on rank 0, and nothing elsewhere."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs) if self.is_master(process_group) else None

            return call

        return decorate

    def _rank(self, process_group: Any) -> int:
        return self.rank if process_group is None else dist.get_rank(process_group)


__getattr__ = CLUSTER.refusing(__name__)
