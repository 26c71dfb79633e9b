"""The identity of this process, in the words of Accelerate."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from unipar.migrated import script


class Processes:
    """The joined processes. Made on all of them: joining is collective."""

    def __init__(self) -> None:
        self._world = script.world()
        self._triggered = False

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return script.device()

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return self._world.size

    @property
    def num_replicas(self) -> int:
        """How many of them read batches of their own."""
        return self._world.data_size

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return self._world.rank

    @property
    def local_process_index(self) -> int:
        """This process's rank among those of its node."""
        return self._world.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self._world.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self._world.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self._world.rank == self._world.size - 1

    @property
    def mixed_precision(self) -> str:
        """``no``, ``bf16``, ``fp16`` or ``fp8``."""
        precision = script.settings().precision
        return "no" if precision == "fp32" else precision

    def wait_for_everyone(self) -> None:
        """Wait until every rank is here. Collective."""
        self._world.barrier()

    def set_trigger(self) -> None:
        """Have every rank's next :meth:`check_trigger` say so."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Return whether a rank has set the trigger, which is then reset. Collective."""
        found = any(self._world.gather(self._triggered))
        self._triggered = self._triggered and not found
        return found

    def print(self, *values: Any, **options: Any) -> None:
        """``print`` in the first process of each node."""
        if self.is_local_main_process:
            print(*values, **options)

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The others wait until rank 0 has left the block. Collective."""
        with self._first(self.is_main_process):
            yield

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The others wait until the first process of each node has left the block. Collective."""
        with self._first(self.is_local_main_process):
            yield

    @contextlib.contextmanager
    def _first(self, this: bool) -> Iterator[None]:
        if not this:
            self._world.barrier()
        yield
        if this:
            self._world.barrier()

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function on rank 0, and nothing elsewhere."""
        return _only(function, self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function in the first process of each node, and nothing elsewhere."""
        return _only(function, self.is_local_main_process)


def _only(function: Callable[..., Any], here: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if here else None

    return call
