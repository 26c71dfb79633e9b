"""What a process knows without an ``Accelerator``, or beside one."""

from __future__ import annotations

from typing import Any

from unipar.compat.accelerate.data_loader import DealtLoader
from unipar.compat.accelerate.plugins import GradientAccumulationPlugin
from unipar.compat.accelerate.processes import DistributedType, Processes
from unipar.compat.run import current
from unipar.compat.tables import Table

__all__ = [
    "AcceleratorState", "DistributedType", "GradientState", "PartialState", "is_initialized",
]  # fmt: skip


def is_initialized() -> bool:
    """Whether there is an ``Accelerator``, so that the run is open."""
    return current.session is not None


class PartialState(Processes):
    """Where this process stands. Any number of them are the same.

    Args:
        cpu: whether it is to use the CPU, also where there is a GPU.
        kwargs: of ``init_process_group``, of which the ``timeout`` is kept.
    """

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        current.placement("cpu" if cpu else "auto", kwargs.get("timeout"))

    @property
    def initialized(self) -> bool:
        """Always."""
        return True

    @property
    def default_device(self) -> Any:
        """This process's device."""
        return self.device

    def destroy_process_group(self, group: Any = None) -> None:
        """End the run."""
        current.close()

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}\n"
            f"Num processes: {self.num_processes}\nProcess index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\nDevice: {self.device}\n"
        )


class AcceleratorState(PartialState):
    """:class:`PartialState` of an open run.

    Attributes:
        deepspeed_plugin: nothing, whatever the strategy: it becomes options of the strategy.
        fsdp_plugin: likewise.
    """

    deepspeed_plugin: None = None
    fsdp_plugin: None = None

    @property
    def mixed_precision(self) -> str:
        """``no``, ``bf16``, ``fp16`` or ``fp8``."""
        precision = current.config.precision if current.config is not None else "fp32"
        return "no" if precision == "fp32" else precision

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"


class GradientState:
    """How far a step has come, and the data that it comes from.

    Args:
        plugin: how gradients are accumulated.

    Attributes:
        sync_gradients: whether this micro-batch is the last of its step.
        loaders: those that are gone over, the innermost last.
    """

    def __init__(self, plugin: GradientAccumulationPlugin) -> None:
        self.plugin = plugin
        self.sync_gradients = True
        self.loaders: list[DealtLoader] = []

    def enter(self, loader: DealtLoader, begins: bool) -> None:
        """A loader begins to be gone over, or has come to its end."""
        self.loaders = [one for one in self.loaders if one is not loader]
        if begins:
            self.loaders.append(loader)

    @property
    def num_steps(self) -> int:
        """Micro-batches of a step."""
        return self.plugin.num_steps or 1

    @property
    def adjust_scheduler(self) -> bool:
        """Whether calls of schedulers between steps are counted: never.

        Accelerate 1.15.0 asks for values that are no defaults (state.py, GradientState), so that
        the plugin's ``True`` does not reach it.
        """
        return False

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of the data ends a step, full or not."""
        return self.plugin.sync_with_dataloader

    @property
    def in_dataloader(self) -> bool:
        """Whether a loader is gone over."""
        return bool(self.loaders)

    @property
    def active_dataloader(self) -> DealtLoader | None:
        """The innermost of those that are gone over."""
        return self.loaders[-1] if self.loaders else None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether this batch is its last."""
        return bool(self.loaders) and self.loaders[-1].end_of_dataloader

    @property
    def remainder(self) -> int:
        """Samples of its last round that count; 0 if all do, -1 where it is not known."""
        return self.loaders[-1].remainder if self.loaders else -1


__getattr__ = Table("accelerate.state").refusing(__name__)
