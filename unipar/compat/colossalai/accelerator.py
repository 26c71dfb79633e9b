"""The device of a run, in the words of ``colossalai.accelerator``."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from unipar.compat.colossalai_names import ACCELERATOR
from unipar.compat.run import current
from unipar.errors import ConfigError

__all__ = ["BaseAccelerator", "auto_set_accelerator", "get_accelerator", "set_accelerator"]

_COUNTED = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
            "utilization")  # fmt: skip
_NOTHING = ("synchronize", "empty_cache", "reset_max_memory_allocated", "reset_max_memory_cached",
            "reset_peak_memory_stats", "set_per_process_memory_fraction")  # fmt: skip


class BaseAccelerator:
    """What ``torch.cuda`` has, of the run's device. On a CPU memory is 0, and waiting is none."""

    @property
    def name(self) -> str:
        """``cuda`` or ``cpu``."""
        return current.placement().device_type

    @property
    def communication_backend(self) -> str:
        """``nccl`` or ``gloo``."""
        return "nccl" if self._on_gpu else "gloo"

    @property
    def is_synchronous(self) -> bool:
        """Whether operations end before the next begins; ``False`` on a CPU, too, as there."""
        return False

    @property
    def support_set_device(self) -> bool:
        """Whether there is more than one to choose from."""
        return self._on_gpu

    @property
    def _on_gpu(self) -> bool:
        return self.name == "cuda"

    def get_current_device(self) -> torch.device:
        """This process's device."""
        return current.device()

    def get_version(self) -> str:
        """The version of CUDA that torch was built for."""
        return torch.version.cuda or "" if self._on_gpu else ""

    def set_to_device(self, models: Any) -> Any:
        """A model, or each of several, on the device."""
        if not isinstance(models, list):
            return models.to(self.get_current_device())
        moved = [one.to(self.get_current_device()) for one in models]
        return moved if len(moved) > 1 else moved[0]

    def autocast(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> contextlib.AbstractContextManager[Any]:
        """``torch.autocast`` on a GPU; on a CPU nothing, as there."""
        if not self._on_gpu:
            return contextlib.nullcontext()
        return torch.autocast("cuda", dtype, enabled=enabled, cache_enabled=cache_enabled)

    def is_available(self) -> bool:
        """Whether there is one."""
        return True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in dir(torch.cuda):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        if self._on_gpu:
            return getattr(torch.cuda, name)
        if name in _COUNTED:
            return lambda *_, **__: 0
        if name in _NOTHING:
            return lambda *_, **__: None

        def unable(*_: Any, **__: Any) -> None:
            raise RuntimeError(f"{name} is of GPUs, and the run is on a CPU")

        return unable

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name})"


_accelerator = BaseAccelerator()


def get_accelerator() -> BaseAccelerator:
    """That of the run's device."""
    return _accelerator


def auto_set_accelerator() -> None:
    """Nothing: the run's ``device`` says which."""


def set_accelerator(accelerator: Any) -> None:
    """Hold what the script wants against what the run has.

    Raises:
        ConfigError: it is another.
    """
    wanted = accelerator if isinstance(accelerator, str) else accelerator.name
    if wanted != _accelerator.name:
        raise ConfigError(
            f"set_accelerator({wanted!r}) asks for another device than the run's, "
            f"{_accelerator.name}. Set device in unipar.yaml, or UNIPAR_DEVICE."
        )


__getattr__ = ACCELERATOR.refusing(__name__)
