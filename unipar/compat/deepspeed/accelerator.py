"""``get_accelerator()``: this process's device, in DeepSpeed's words."""

from __future__ import annotations

import contextlib
import functools
import os
from typing import Any

import torch

from unipar.compat.deepspeed_names import ACCELERATOR
from unipar.compat.run import current
from unipar.compat.tables import Table

__all__ = ["DeepSpeedAccelerator", "get_accelerator"]

_MEMORY = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
           "memory_cached", "max_memory_cached", "reset_peak_memory_stats",
           "reset_max_memory_allocated", "reset_max_memory_cached")  # fmt: skip
_RANDOM = ("manual_seed", "initial_seed", "get_rng_state", "set_rng_state", "default_generator")
_OTHERWISE = {"memory_cached": "memory_reserved", "max_memory_cached": "max_memory_reserved"}


class DeepSpeedAccelerator:
    """The device of the run: a GPU where it has one, or else the CPU."""

    @property
    def _name(self) -> str:
        return current.placement().device_type

    @property
    def _module(self) -> Any:
        return torch.cuda if self._name == "cuda" else torch.cpu

    def device_name(self, device_index: int | None = None) -> str:
        """The name of a device: ``cpu``, ``cuda``, ``cuda:1``."""
        numbered = device_index is not None and self._name == "cuda"
        return f"cuda:{device_index}" if numbered else self._name

    def current_device_name(self) -> str:
        """The name of this process's device."""
        return str(current.device())

    def current_device(self) -> Any:
        """The number of this process's GPU, or ``cpu``."""
        return torch.cuda.current_device() if self._name == "cuda" else "cpu"

    def device(self, device_index: int | None = None) -> contextlib.AbstractContextManager[Any]:
        """A block on another GPU."""
        if self._name == "cuda":
            return torch.cuda.device(device_index)
        return contextlib.nullcontext()

    def device_count(self) -> int:
        """How many devices this process sees."""
        return torch.cuda.device_count() if self._name == "cuda" else 1

    def set_device(self, device_index: int) -> None:
        """Make a GPU the current one."""
        if self._name == "cuda":
            torch.cuda.set_device(device_index)

    def is_available(self) -> bool:
        """Always."""
        return True

    def is_synchronized_device(self) -> bool:
        """Whether there are no streams."""
        return self._name == "cpu"

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait for the device."""
        if self._name == "cuda":
            torch.cuda.synchronize(device_index)

    def empty_cache(self) -> None:
        """Give cached memory of a GPU back."""
        if self._name == "cuda":
            torch.cuda.empty_cache()

    def random(self) -> Any:
        """The module of random numbers."""
        return torch.random

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's generators, of all devices."""
        torch.manual_seed(seed)

    def is_bf16_supported(self) -> bool:
        """Whether the device computes in bf16."""
        return self._name == "cpu" or torch.cuda.is_bf16_supported()

    def is_fp16_supported(self) -> bool:
        """Always."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        """Those that a run may compute in."""
        bf16 = [torch.bfloat16] if self.is_bf16_supported() else []
        return [torch.float, torch.half, *bf16]

    def communication_backend_name(self) -> str:
        """What processes talk by."""
        return "nccl" if self._name == "cuda" else "gloo"

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the device."""
        return tensor.device.type == self._name

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """The tensor in page-locked memory, where there is a GPU."""
        return tensor.pin_memory() if self._name == "cuda" else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in page-locked memory."""
        return tensor.is_pinned()

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device."""
        if self._name == "cuda":
            return torch.cuda.get_device_properties(device_index).total_memory
        return _host_bytes("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device that are free."""
        if self._name == "cuda":
            return torch.cuda.mem_get_info(device_index)[0]
        return _host_bytes("SC_AVPHYS_PAGES")

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Torch's counts of a GPU's memory; none on a CPU."""
        return torch.cuda.memory_stats(device_index) if self._name == "cuda" else {}

    def range_push(self, msg: str) -> None:
        """Begin a range of a profile."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_push(msg)

    def range_pop(self) -> None:
        """End a range of a profile."""
        if self._name == "cuda":
            torch.cuda.nvtx.range_pop()

    def lazy_call(self, callback: Any) -> Any:
        """Call it."""
        return callback()

    def __getattr__(self, name: str) -> Any:
        row = ACCELERATOR.find(name)
        if name.startswith("_") or row is None or row.fate == "refused":
            raise AttributeError(
                f"get_accelerator() has no {name}. {row.why if row is not None else ''}"
            )
        if name in _MEMORY:
            # Nobody counts the memory of tensors on a host.
            name = _OTHERWISE.get(name, name)
            return getattr(torch.cuda, name) if self._name == "cuda" else lambda *_: 0
        if name == "default_stream" and self._name == "cpu":
            name = "current_stream"
        if name in _RANDOM and self._name == "cpu":
            return getattr(torch.random, name)
        if name == "default_generator":
            return lambda index: torch.cuda.default_generators[index]
        return getattr(self._module, name)


def _host_bytes(pages: str) -> int:
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


@functools.cache
def get_accelerator() -> DeepSpeedAccelerator:
    """The device of the run."""
    return DeepSpeedAccelerator()


__getattr__ = Table("deepspeed.accelerator").refusing(__name__)
