"""``DeepSpeedEngine``: a model under a strategy, stepped on for every micro-batch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from unipar.compat.deepspeed.data import DeepSpeedDataLoader
from unipar.compat.deepspeed.facts import Facts
from unipar.compat.deepspeed.parts import EngineModel, EngineOptimizer, Unlogged
from unipar.compat.deepspeed_names import ENGINE, refuse
from unipar.compat.run import current
from unipar.errors import ConfigError


class DeepSpeedEngine(Facts):
    """What ``deepspeed.initialize`` gives: it is called, gets a loss, and is stepped.

    Args:
        model: taken over.
        optimizer: of that model; ``None``: it is not trained.
        config: DeepSpeed's configuration.
        micro_batch_size: samples of a micro-batch on a rank.
        accumulation_steps: micro-batches of a step.
        precision: what the run computes in.
        clips: whether gradients are clipped, and so their norm is known.
        collate_fn: for loaders that it makes.

    Attributes:
        module: the model, as the strategy has made it.
        optimizer: as given.
        client_optimizer: what ``initialize`` was given to step, or to build that.
        lr_scheduler: is stepped after every update.
        training_data: what ``initialize`` was given.
        training_dataloader: of the data that ``initialize`` was given.
        config: DeepSpeed's configuration.
        micro_steps: micro-batches so far.
        global_steps: updates so far, and those that were skipped.
        global_samples: samples of these, over all ranks.
        skipped_steps: updates that were left out, as gradients were not finite; under
            ``torch_autocast`` without ZeRO none is counted.
    """

    def __init__(
        self,
        model: EngineModel,
        optimizer: EngineOptimizer | None,
        config: Mapping[str, Any],
        *,
        micro_batch_size: int,
        accumulation_steps: int,
        precision: str,
        clips: bool,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        super().__init__()
        self.module = model.module
        # Not a submodule: names of parameters go by the module's alone.
        self.__dict__["_model"] = model
        self.optimizer = optimizer
        self.client_optimizer: Any = None
        self.lr_scheduler: Any = None
        self.training_data: Any = None
        self.training_dataloader: DeepSpeedDataLoader | None = None
        self.config = dict(config)
        self.collate_fn = collate_fn
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
        self._size, self._accumulation = micro_batch_size, accumulation_steps
        self._precision, self._clips = precision, clips
        self._boundary: bool | None = None
        self._called = self._applied = False
        self._norm: float | None = None

    # -- the loop --------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model."""
        output = self._model(*inputs, **kwargs)
        self._called |= torch.is_grad_enabled()
        return output

    def backward(
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True
    ) -> torch.Tensor:
        """Add the gradients of a micro-batch.

        Args:
            loss: scalar tensor; it is divided by the number of micro-batches of a step.
            retain_graph: refused.
            scale_wrt_gas: whether it is divided.

        Returns:
            The loss that was trained on.

        Raises:
            ConfigError: it was not computed by this engine, or there is no optimizer.
        """
        if retain_graph:
            refuse("engine.backward(loss, retain_graph=True)")
        if not self._called:
            raise ConfigError(
                "engine.backward(loss) came without engine(…) since the last one. Compute the loss "
                "of what the engine gives, not of engine.module(…) or the model itself; and call "
                "backward once for it."
            )
        part = loss / self._accumulation if scale_wrt_gas and self._accumulation > 1 else loss
        self._stepping().backward(
            part,
            likely_last=self.is_gradient_accumulation_boundary() and not current.unsynced,
            unsynced=current.unsynced,
        )
        self._called = False
        return part

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Count the micro-batch, and update the weights if it is the last of a step.

        Args:
            lr_kwargs: of the scheduler's ``step``.
        """
        self._applied = False
        optimizer = self._stepping()
        if self.is_gradient_accumulation_boundary():
            if not optimizer.begun:
                raise ConfigError(
                    "engine.step() came without engine.backward(loss) since the last step. Call "
                    "that, and not loss.backward(), which an engine does not see."
                )
            result = optimizer.take_step()
            skipped = optimizer.step_was_skipped and not self._skips_untold()
            self.global_steps += 1
            self.global_samples += self.train_batch_size()
            self.skipped_steps += skipped
            self._applied, self._norm = not skipped, math.inf if skipped else result
            if self.lr_scheduler is not None and not skipped:
                self.lr_scheduler.step(**(lr_kwargs or {}))
        self.micro_steps += 1

    def _skips_untold(self) -> bool:
        """Whether gradients that are not finite leave a step out and nobody counts it.

        DeepSpeed 0.19.8, runtime/engine.py, _take_model_step: without ZeRO torch's own scaler does
        so under ``torch_autocast``, and the engine asks only optimizers of DeepSpeed's.
        """
        autocast = self.config.get("torch_autocast") or {}
        asked = bool(autocast.get("enabled")) and not self.zero_optimization()
        return asked and self.fp16_enabled()

    def _stepping(self) -> EngineOptimizer:
        if self.optimizer is None:
            raise ConfigError(
                "this engine has no optimizer, and cannot be trained. Give initialize one, or "
                "name one in its configuration."
            )
        return self.optimizer

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether this micro-batch is the last of a step; after ``step()``, the next one."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self._accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say from now on whether micro-batches are the last of a step, instead of counting."""
        self._boundary = is_boundary

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing between steps, where there are no gradients.

        Raises:
            ConfigError: there are.
        """
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A block of backward passes that no step is to follow."""
        return current.accumulating()

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Nothing: an engine reduces gradients when it steps."""

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss: engines scale it themselves."""
        return loss

    def was_step_applied(self) -> bool:
        """Return whether the last ``step()`` has changed the weights."""
        return self._applied

    # -- data ------------------------------------------------------------------------------------

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """A loader of this rank's share of a dataset; in order, unless it is to train on."""
        world = current.world()
        if data_sampler is None and route != "train":
            data_sampler = torch.utils.data.DistributedSampler(
                dataset, num_replicas=world.data_size, rank=world.data_rank, shuffle=False
            )
        return DeepSpeedDataLoader(
            dataset, batch_size or self._size, collate_fn or self.collate_fn,
            num_local_io_workers, data_sampler, drop_last=self.dataloader_drop_last(),
        )  # fmt: skip

    def dataloader_drop_last(self) -> bool:
        """Return whether loaders leave a last, shorter batch out."""
        return bool(self.config.get("dataloader_drop_last", False))

    # -- memory and logs of DeepSpeed's ----------------------------------------------------------

    is_compiled = False
    timers = tput_timer = monitor = Unlogged()

    def empty_partition_cache(self) -> None:
        """Nothing."""

    def dump_state(self) -> bool:
        """What the configuration says; nothing is printed."""
        return bool(self.config.get("dump_state", False))

    def print_forward_breakdown(self, fwd_time: float) -> None:
        """Nothing."""

    def train_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Refused."""
        refuse("engine.train_batch()")

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Refused."""
        refuse("engine.eval_batch()")

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        ENGINE.refuse("compile", "engine.compile(…)")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__ and not hasattr(type(self), name):
            row = ENGINE.find(name)
            if row is not None and row.fate == "refused":
                ENGINE.refuse(name, f"engine.{name} = {value!r}")
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "module" not in self.__dict__.get("_modules", {}):
                raise
        if hasattr(self.module, name):
            return getattr(self.module, name)
        row = ENGINE.find(name)
        if row is not None and row.fate == "refused":
            ENGINE.refuse(name, f"engine.{name}")
        raise AttributeError(f"'DeepSpeedEngine' object has no attribute '{name}'")

    def __deepcopy__(self, memo: Any) -> Any:
        raise ConfigError(
            "an engine cannot be copied. Copy the model before deepspeed.initialize, or "
            "engine.module where the strategy does not divide it."
        )
