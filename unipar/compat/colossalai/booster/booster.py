"""The ``Booster``: what it boosts, and a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from unipar.compat.colossalai.booster import checkpoints, pipeline
from unipar.compat.colossalai.booster.boosted import BoostedModel, BoostedOptimizer
from unipar.compat.colossalai.booster.mixed_precision import (
    MixedPrecision,
    mixed_precision_factory,
)
from unipar.compat.colossalai.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    TorchDDPPlugin,
)
from unipar.compat.colossalai.booster.plugin_base import Plugin
from unipar.compat.colossalai.logging import get_dist_logger
from unipar.compat.colossalai_names import refuse
from unipar.compat.optimizers import training_in
from unipar.compat.run import current
from unipar.engine import COMPUTE_DTYPES
from unipar.errors import ConfigError

_NEVER_TRAINED = (
    "frozen when {} took the model, and trained now. There its optimizer goes on without these; "
    "here they are trained as all others are. Thaw them before booster.boost, or leave them "
    "frozen, and both do the same."
)


class Booster:
    """Colossal-AI's, over a run under any strategy that takes a script's own loop. Collective.

    Args:
        device: the run's, which ``unipar.yaml`` may say.
        mixed_precision: ``fp16``, ``bf16`` or an object; where a plugin has ``precision``, that one
            counts, as there.
        plugin: what says how the model is divided, where nothing else does.

    Raises:
        ConfigError: a setting has no counterpart, or the strategy cannot run here.
    """

    def __init__(
        self,
        device: str | None = None,
        mixed_precision: MixedPrecision | str | None = None,
        plugin: Plugin | None = None,
    ) -> None:
        if plugin is None and current.placement().size > 1:
            raise ConfigError(
                "a Booster without a plugin trains each rank by itself. Give it one, such as "
                "Booster(plugin=TorchDDPPlugin())."
            )
        self.plugin, self.logger, self.accelerator = plugin, get_dist_logger(), None
        asked = dict(plugin.asked()) if plugin is not None else {}
        if isinstance(mixed_precision, str):
            mixed_precision = mixed_precision_factory(mixed_precision)
        if plugin is not None and plugin.control_precision():
            if mixed_precision is not None:
                self.logger.warning(
                    "The plugin will control the precision, so the mixed_precision argument will "
                    "be ignored.", ranks=[0],
                )  # fmt: skip
            mixed_precision = None
        elif mixed_precision is not None:
            asked |= mixed_precision.asked()
        if plugin is None and device is not None:
            asked["device"] = torch.device(device).type
        self.mixed_precision = mixed_precision
        self._session = current.open(asked)
        if plugin is not None:
            plugin.warn_of_replicas()
        assert current.config is not None
        precision = current.config.precision
        self._half = None if precision == "fp32" else COMPUTE_DTYPES[precision]
        self._may_skip = precision == "fp16" or current.config.on_nan == "skip"

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader | None = None,
        lr_scheduler: Any = None,
    ) -> tuple[Any, Any, Any, Any, Any]:
        """Put a model under the strategy, with its optimizer. Collective.

        A model without one computes by itself, with rank 0's weights.

        Raises:
            ConfigError: the strategy cannot train it so.
        """
        plugin, world = self.plugin, self._session.world
        if not isinstance(model, BoostedModel):
            if hasattr(model, "_orig_mod"):
                refuse("boost(torch.compile(model))")
            if plugin is not None and plugin.syncs_batchnorm and world.device.type == "cuda":
                model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
            widens = isinstance(plugin, GeminiPlugin) and plugin.force_outputs_fp32
            model = BoostedModel(
                model, self._session, half=self._half, device=world.device, widens=widens
            )
        learns = any(one.requires_grad for one in model.parameters())
        model.begins_alike = learns and plugin is not None and plugin.shares_buffers
        if optimizer is None:
            model.share_weights(buffers=plugin is None or plugin.shares_buffers)
        elif not isinstance(optimizer, BoostedOptimizer):
            optimizer = self._boosted(optimizer, model)
        if criterion is not None and self.mixed_precision is not None:
            criterion = _Autocast(criterion, world.device.type, self._half)
        return model, optimizer, criterion, dataloader, lr_scheduler

    def _boosted(self, optimizer: Optimizer, model: BoostedModel) -> BoostedOptimizer:
        boosted = BoostedOptimizer(
            optimizer, self._session, plugin=self.plugin, may_skip=self._may_skip
        )
        boosted.same_parameters = isinstance(self.plugin, TorchDDPPlugin)
        if self.plugin is not None:
            boosted.own_buffers = not self.plugin.shares_buffers
            if self.plugin.has_copies:
                boosted.of_thawed = _NEVER_TRAINED.format(type(self.plugin).__name__)
        if boosted.model_among([model]) is None:
            raise ConfigError(
                f"the {type(optimizer).__name__} updates no parameter of the "
                f"{type(model.module).__name__}. Boost a model with the optimizer over its own "
                "parameters, built before it is boosted."
            )
        max_norm = self.plugin.max_norm if self.plugin is not None else 0
        boosted.takes_up(
            model, max_grad_norm=float(max_norm) if max_norm and max_norm > 0 else None
        )  # fmt: skip
        return boosted

    # -- a step ----------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, optimizer: Any) -> None:
        """Add the gradient of a loss, as it is."""
        optimizer.backward(loss)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: Any,
        criterion: Callable[[Any, Any], torch.Tensor],
        optimizer: Any = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> dict[str, Any]:
        """The micro-batches of a batch, forward and backward, one by one.

        Returns:
            ``loss`` and ``outputs``, on every rank.
        """
        if not isinstance(self.plugin, HybridParallelPlugin):
            raise ConfigError(
                f"execute_pipeline with {type(self.plugin).__name__}: only HybridParallelPlugin "
                "has micro-batches. Call model(...) and booster.backward(loss, optimizer)."
            )
        return pipeline.execute(
            self.plugin, data_iter, model, criterion, optimizer, return_loss=return_loss,
            return_outputs=return_outputs,
        )  # fmt: skip

    @contextlib.contextmanager
    def no_sync(self, model: Any = None, optimizer: Any = None) -> Iterator[None]:
        """A block of backward passes; an engine reduces gradients when its optimizer steps."""
        held = [
            one
            for one in training_in(self._session, BoostedOptimizer)
            if optimizer in (None, one) and model in (None, one.model)
        ]
        for one in held:
            one.unsynced = True
        try:
            with contextlib.ExitStack() as blocks:
                for boosted in {one.model for one in held if one.model is not None}:
                    blocks.enter_context(boosted.no_sync())
                yield
        finally:
            for one in held:
                one.unsynced = False

    # -- files -----------------------------------------------------------------------------------

    def save_model(
        self,
        model: Any,
        checkpoint: str,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:
        """Write weights, at full shapes, into a file or, sharded, a directory. Collective."""
        _check_prefix(prefix)
        checkpoints.save_model(
            model, Path(checkpoint), self._session.world,
            shard_mb=size_per_shard if shard else None, safe=use_safetensors or use_async,
        )  # fmt: skip

    def load_model(
        self,
        model: Any,
        checkpoint: str,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Take over weights of a file, or of a directory with an index. Collective."""
        checkpoints.load_model(model, Path(checkpoint), self._session.world, strict=strict)

    def save_optimizer(
        self,
        optimizer: Any,
        checkpoint: str,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        """Write an optimizer's state by numbers of parameters, at full shapes. Collective."""
        _check_prefix(prefix)
        checkpoints.save_optimizer(
            optimizer, Path(checkpoint), self._session.world,
            shard_mb=size_per_shard if shard else None,
        )  # fmt: skip

    def load_optimizer(
        self,
        optimizer: Any,
        checkpoint: str,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Take over an optimizer's state of a file, or of a directory with an index. Collective."""
        checkpoints.load_optimizer(optimizer, Path(checkpoint), self._session.world)

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str) -> None:
        """Write a scheduler's state. Collective."""
        checkpoints.save_scheduler(lr_scheduler, Path(checkpoint), self._session.world)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str) -> None:
        """Take over a scheduler's state."""
        checkpoints.load_scheduler(lr_scheduler, Path(checkpoint))

    # -- refused ---------------------------------------------------------------------------------

    def enable_lora(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        refuse("Booster.enable_lora")

    def save_lora_as_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Refused."""
        refuse("Booster.save_lora_as_pretrained")


def _check_prefix(prefix: str | None) -> None:
    if prefix is not None:
        refuse("Booster.save_model(prefix=…)")


class _Autocast(nn.Module):
    """A criterion that computes as the model does."""

    def __init__(self, module: Any, device: str, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.module, self._device, self._dtype = module, device, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self._device, self._dtype, enabled=self._dtype is not None):
            return self.module(*args, **kwargs)
