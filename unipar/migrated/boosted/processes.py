"""The processes of a script migrated from Colossal-AI."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from unipar.migrated import script


def launch(seed: int = 1024) -> None:
    """Join the processes, and seed the generators of Python, NumPy and torch. Collective."""
    script.open()
    set_seed(seed)


def set_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Coordinator:
    """The identity of this process, in the words of ``DistCoordinator``. Made on all ranks."""

    def __init__(self) -> None:
        self._world = script.world()

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

    def is_master(self) -> bool:
        """Return whether this is rank 0."""
        return self._world.is_main

    def is_node_master(self) -> bool:
        """Return whether this is the first process of its node."""
        return self._world.local_rank == 0

    def is_last_process(self) -> bool:
        """Return whether this is the last rank."""
        return self._world.rank == self._world.size - 1

    def print_on_master(self, msg: str) -> None:
        """Print on rank 0."""
        if self.is_master():
            print(msg)

    def print_on_node_master(self, msg: str) -> None:
        """Print in the first process of each node."""
        if self.is_node_master():
            print(msg)

    def block_all(self) -> None:
        """Wait until every rank is here. Collective."""
        self._world.barrier()

    @contextlib.contextmanager
    def priority_execution(self, executor_rank: int = 0) -> Iterator[None]:
        """The others wait until one rank has left the block. Collective."""
        if self.rank != executor_rank:
            self._world.barrier()
        yield
        if self.rank == executor_rank:
            self._world.barrier()

    def on_master_only(self) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Decorator: the function on rank 0, and nothing elsewhere."""

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                return function(*args, **kwargs) if self.is_master() else None

            return call

        return decorate
