"""What an ``Accelerator`` is set to, by Accelerate's names."""

from __future__ import annotations

from typing import Any

import torch

from unipar.compat.accelerate.optimizer import AcceleratedOptimizer
from unipar.compat.accelerate.plugins import DataLoaderConfiguration, ProjectConfiguration
from unipar.compat.accelerate.processes import Processes
from unipar.compat.accelerate.state import AcceleratorState, GradientState
from unipar.compat.models import PreparedModel
from unipar.session import Session


class Settings(Processes):
    """Settings, of which some may be changed between steps.

    Attributes:
        dataloader_config: how data is shared among ranks.
        gradient_state: how far a step has come.
        project_configuration: where files go.
        state: where this process stands, and the run's precision.
        step: micro-batches of the present step that have begun.
    """

    dataloader_config: DataLoaderConfiguration
    gradient_state: GradientState
    project_configuration: ProjectConfiguration
    state: AcceleratorState
    step: int
    _half: torch.dtype | None
    _session: Session
    _models: list[PreparedModel]
    _optimizers: list[AcceleratedOptimizer]
    _schedulers: list[Any]
    _dataloaders: list[Any]

    @property
    def mixed_precision(self) -> str:
        """``no``, ``bf16``, ``fp16`` or ``fp8``."""
        return self.state.mixed_precision

    @property
    def native_amp(self) -> bool:
        """Whether models compute in half precision."""
        return self._half is not None

    @property
    def multi_device(self) -> bool:
        """Whether there are several processes."""
        return self.use_distributed

    @property
    def scaler(self) -> None:
        """Nothing: engines scale the losses of fp16 themselves."""
        return

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch is the last of its step."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self.gradient_state.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a step, and what each loss is divided by."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, value: int) -> None:
        self.gradient_state.plugin.num_steps = value

    @property
    def split_batches(self) -> bool:
        """Whether batches are cut up among ranks."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads for all; ``None``: streams."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether the last round of batches is filled up from the beginning."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether a seed and the number of the epoch make the order of data."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def non_blocking(self) -> bool:
        """Whether copies to a GPU overlap, which they do wherever they can."""
        return self.dataloader_config.non_blocking

    @property
    def project_dir(self) -> str | None:
        """Where the project's files go."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Where trackers' files go."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The number of the next checkpoint that is numbered."""
        return self.project_configuration.iteration

    @property
    def should_save_model(self) -> bool:
        """Whether this rank writes what :meth:`get_state_dict` gives."""
        return self.is_main_process

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step of an optimizer left the weights as they were."""
        return any(one.step_was_skipped for one in self._optimizers)
