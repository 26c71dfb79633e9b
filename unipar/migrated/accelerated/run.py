"""The run of a script migrated from Accelerate."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from unipar.errors import ConfigError
from unipar.migrated import script
from unipar.migrated.accelerated import gathering
from unipar.migrated.accelerated.checkpoints import Checkpoints
from unipar.migrated.accelerated.dispatching import DealtLoader, skip_first_batches
from unipar.migrated.accelerated.processes import Processes
from unipar.migrated.accelerated.schedulers import Paced
from unipar.migrated.accelerated.trackers import Trackers

_current: list[Run] = []


class Run(Processes):
    """The rest of an ``Accelerator`` when the strategy does the training. Collective.

    Args:
        gradient_accumulation_steps: micro-batches of a step under :meth:`accumulate`, and what
            each loss is divided by.
        split_batches: batches are cut up among ranks instead of being dealt out whole.
        even_batches: the last round of batches is filled up with samples from the beginning.
        device_placement: batches are moved to the device.
        step_scheduler_with_optimizer: a paced scheduler steps when the optimizer does, and as
            often as there are ranks, unless batches are split.
        sync_with_dataloader: the last batch of the data ends a step, full or not.
        adjust_scheduler: calls of a paced scheduler between steps are counted.
        log_with: names of trackers.
        project_dir: where trackers and checkpoints go.
        logging_dir: where trackers go instead.
        automatic_checkpoint_naming: :meth:`save_state` numbers its checkpoints itself.

    Attributes:
        sync_gradients: whether this micro-batch is the last of its step.
        optimizer_step_was_skipped: whether the last step left the weights as they were.

    Raises:
        ConfigError: a setting is wrong, or the strategy cannot run here.
    """

    def __init__(
        self,
        *,
        gradient_accumulation_steps: int = 1,
        split_batches: bool = False,
        even_batches: bool = True,
        device_placement: bool = True,
        step_scheduler_with_optimizer: bool = True,
        sync_with_dataloader: bool = True,
        adjust_scheduler: bool = True,
        log_with: str | Iterable[str] | None = None,
        project_dir: str | Path | None = None,
        logging_dir: str | Path | None = None,
        automatic_checkpoint_naming: bool = False,
    ) -> None:
        super().__init__()
        self.gradient_accumulation_steps = int(gradient_accumulation_steps)
        self.split_batches, self.even_batches = split_batches, even_batches
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.sync_with_dataloader, self.adjust_scheduler = sync_with_dataloader, adjust_scheduler
        self.project_dir, self.sync_gradients, self.step = project_dir, True, 0
        self.optimizer_step_was_skipped = False
        self._loaders: list[DealtLoader] = []
        self._state = Checkpoints(
            Path(project_dir or ".") / "checkpoints" if automatic_checkpoint_naming else None
        )
        self._trackers = Trackers(log_with, Path(logging_dir or project_dir or "."))
        _current[:] = [self]

    # -- training --------------------------------------------------------------------------------

    def deal(self, loader: DataLoader) -> DealtLoader:
        """This rank's share of a loader's batches, on the device."""
        return DealtLoader(
            loader, self._world, split=self.split_batches, even=self.even_batches,
            place=self.device_placement, enter=self._enter,
        )  # fmt: skip

    def _enter(self, loader: DealtLoader | None) -> None:
        if loader is not None:
            self._loaders.append(loader)
        elif self._loaders:
            self._loaders.pop()

    def pace(self, scheduler: Any) -> Paced:
        """The scheduler, stepped when the optimizer steps."""
        paced = Paced(scheduler, self)
        self._state.schedulers.append(paced)
        return paced

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """One micro-batch; the last of a step, or of the data, sets :attr:`sync_gradients`."""
        if self.sync_with_dataloader and self._loaders and self._loaders[-1].at_end:
            self.step, self.sync_gradients = 0, True
        else:
            self.step += 1
            self.sync_gradients = self.step % self.gradient_accumulation_steps == 0
        yield

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Nothing: an engine knows by itself when gradients are to be reduced."""
        return contextlib.nullcontext()

    def autocast(self) -> torch.autocast:
        """Autocast to the run's precision."""
        return script.autocast()

    # -- metrics ---------------------------------------------------------------------------------

    def gather(self, data: Any) -> Any:
        """Every rank's tensors, one behind the other. Collective."""
        return gathering.gather(data, self._world)

    def gather_for_metrics(self, data: Any, use_gather_object: bool = False) -> Any:
        """:meth:`gather` without the samples that fill up the last round. Collective."""
        if use_gather_object or not gathering.holds_tensors_only(data):
            found = gathering.gather_objects(data, self._world)
        else:
            found = self.gather(data)
        loader = self._loaders[-1] if self._loaders else None
        if loader is None or not loader.at_end or loader.remainder <= 0:
            return found
        kept = loader.remainder
        if use_gather_object or not gathering.holds_tensors_only(data):
            return found[:kept]
        return gathering.each_tensor(lambda one: one[:kept] if one.ndim else one, found)

    def reduce(self, data: Any, reduction: gathering.Reduction = "sum") -> Any:
        """Sum, mean or maximum of each tensor over ranks. Collective."""
        return gathering.reduce(data, self._world, reduction)

    def pad_across_processes(
        self, data: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Tensors as long as the longest of any rank. Collective."""
        return gathering.pad(data, self._world, dim, pad_index, first=pad_first)

    def init_trackers(self, project_name: str, config: Mapping[str, Any] | None = None) -> None:
        """Open the trackers on rank 0."""
        self._trackers.start(project_name, config, self._world)

    def log(self, values: Mapping[str, Any], step: int | None = None) -> None:
        """Give numbers to the trackers."""
        self._trackers.log(values, step)

    def end_training(self) -> None:
        """Close the trackers, and end the run. Collective."""
        self._trackers.close()
        script.close()

    # -- files -----------------------------------------------------------------------------------

    def save(self, obj: Any, f: Any, safe_serialization: bool = False) -> None:
        """Write an object on rank 0; the others go on."""
        if not self.is_main_process:
            return
        if safe_serialization:
            from safetensors.torch import save_file

            save_file({name: one.clone().contiguous() for name, one in obj.items()}, f)
        else:
            torch.save(obj, f)

    def get_state_dict(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """A model's state dict at full shapes; collective where ranks divide it, and only there."""
        if "parameters" in script.session().capabilities.sharded:
            return script.gathered(model).state_dict()
        return model.state_dict()

    def save_model(
        self, model: nn.Module, save_directory: str | Path, safe_serialization: bool = True
    ) -> None:
        """Write a model's weights, at full shapes, into one file. Collective."""
        state = self.get_state_dict(model)
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        name = "model.safetensors" if safe_serialization else "pytorch_model.bin"
        self.save(state, Path(save_directory) / name, safe_serialization)
        self._world.barrier()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have the ``state_dict()`` of these in checkpoints too."""
        self._state.objects += objects

    def save_state(self, output_dir: str | Path | None = None) -> Path:
        """Write a checkpoint of everything, which any strategy reads. Collective."""
        return self._state.save(output_dir, self.step)

    def load_state(self, input_dir: str | Path | None = None) -> None:
        """Take over what :meth:`save_state` has written. Collective."""
        self.step = self._state.load(input_dir)

    def skip_first_batches(self, dataloader: DealtLoader, num_batches: int = 0) -> DealtLoader:
        """The loader without the first batches of its next epochs."""
        return skip_first_batches(dataloader, num_batches)


def current() -> Run:
    """The process's run.

    Raises:
        ConfigError: there is none yet.
    """
    if not _current:
        raise ConfigError("there is no run yet: accelerated.Run(...) comes first.")
    return _current[0]
