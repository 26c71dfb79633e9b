"""The identity of this process, and who goes first, in the words of Accelerate."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch

from unipar.compat.run import current
from unipar.errors import ConfigError


class DistributedType(str, Enum):
    """How processes are joined. Whatever the strategy, several are ``MULTI_GPU`` or ``MULTI_CPU``,
    so that scripts take the branch that asks for nothing of a framework's own."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"

    def __str__(self) -> str:
        return self.value


class Processes:
    """What does not need the others until it is a collective; the first of those joins them."""

    @property
    def device(self) -> torch.device:
        """This process's device."""
        return current.device()

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return current.placement().size

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return current.placement().rank

    @property
    def local_process_index(self) -> int:
        """This process's rank among those of its node."""
        return current.placement().local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its node."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there are several."""
        return self.num_processes > 1

    @property
    def distributed_type(self) -> DistributedType:
        """``NO``, ``MULTI_GPU`` or ``MULTI_CPU``."""
        if not self.use_distributed:
            return DistributedType.NO
        on_gpu = current.placement().device_type == "cuda"
        return DistributedType.MULTI_GPU if on_gpu else DistributedType.MULTI_CPU

    def wait_for_everyone(self) -> None:
        """Wait until every rank is here. Collective."""
        current.world().barrier()

    def print(self, *values: Any, **options: Any) -> None:
        """``print`` in the first process of each node."""
        if self.is_local_main_process:
            print(*values, **options)

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This rank's part of a list, tuple, tensor, ``datasets.Dataset``, or dict of these.

        Args:
            inputs: the same on all ranks; the first ranks get one element more. A dict holds the
                parts afterwards, and what is none of these every rank gets whole, as there.
            apply_padding: whether the last element is repeated, so that all have as many.

        Raises:
            ConfigError: the values of a dict have different lengths.
        """
        if not self.use_distributed:
            yield inputs
            return
        length = len(inputs)
        if isinstance(inputs, dict):
            lengths = {key: len(one) for key, one in inputs.items()}
            if len({*lengths.values()}) > 1:
                raise ConfigError(
                    "split_between_processes splits the values of a dict alike, and these have "
                    f"{', '.join(f'{key}: {one}' for key, one in lengths.items())} elements. "
                    "Give lists of the same length."
                )
            length = max(lengths.values(), default=0)
        yield self._part(inputs, length, apply_padding)

    def _part(self, inputs: Any, length: int, padded: bool) -> Any:
        if isinstance(inputs, dict):
            # In place, and by the length of the outermost: Accelerate 1.15.0, state.py.
            for key, value in inputs.items():
                inputs[key] = self._part(value, length, padded)
            return inputs
        rows: Any = inputs if _is_dataset(inputs) else None
        if rows is None and not isinstance(inputs, (list, tuple, torch.Tensor)):
            return inputs
        rank, size = self.process_index, self.num_processes
        fewer, more = divmod(length, size)
        begin = rank * fewer + min(rank, more)
        found = range(len(inputs))[begin : begin + fewer + (rank < more)]
        missing = (math.ceil(length / size) - len(found)) if padded else 0
        if rows is not None:
            return rows.select([*found, *[len(inputs) - 1] * missing])
        part: Any = inputs[found.start : found.stop]
        last: Any = inputs[-1:]
        if isinstance(part, torch.Tensor):
            # Where a following gather finds it.
            return torch.cat([part, *[last] * missing]).to(self.device) if padded else part
        return part + last * missing

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
            self.wait_for_everyone()
        yield
        if this:
            self.wait_for_everyone()

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function on rank 0, and nothing elsewhere."""
        return _only(function, self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function in the first process of each node, and nothing elsewhere."""
        return _only(function, self.is_local_main_process)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function on the last rank, and nothing elsewhere."""
        return _only(function, self.is_last_process)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """The function on one rank, and nothing elsewhere; where it is alone, always."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        here = self.process_index == process_index
        return _only(function, here or not self.use_distributed)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """The function in one process of each node, likewise."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        here = self.local_process_index == local_process_index
        return _only(function, here or not self.use_distributed)


def _is_dataset(inputs: Any) -> bool:
    """Whether it is a table of Hugging Face's ``datasets``."""
    known = sys.modules.get("datasets")
    return known is not None and isinstance(inputs, known.Dataset)


def _only(function: Callable[..., Any], here: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if here else None

    return call
