"""A module under DeepSpeed's engine; at stage 0, where every rank keeps everything."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unipar.engine import ModuleEngine, Undo, group_names, refuse_inner_gradients
from unipar.logs import quiet_framework
from unipar.strategy import EngineSpec
from unipar.world import World
from unipar_deepspeed import framework
from unipar_deepspeed.unused import Unused

Initialize = Callable[[nn.Module, Optimizer, dict[str, Any]], tuple[Any, Undo]]
"""Makes DeepSpeed's engine of module, optimizer and configuration; and what lets go of it again."""


def initialize(module: nn.Module, optimizer: Optimizer, config: dict[str, Any]) -> tuple[Any, Undo]:
    """``deepspeed.initialize``, as one would call it."""
    engine, *_ = framework.load().initialize(model=module, optimizer=optimizer, config=config)
    return engine, lambda: None


class DeepSpeedEngine(ModuleEngine):
    """What is common to all stages: DeepSpeed's engine runs forward, backward and reductions.

    DeepSpeed is kept in fp32, and half precision is autocast's around it: weights, moments and
    reductions stay fp32, as in every strategy.

    Args:
        spec: what the user asked for.
        world: the joined processes.
        module: the user's module.
        config: DeepSpeed's configuration.
        initialize: what calls ``deepspeed.initialize``.
        undo: called by :meth:`close`, newest first.
    """

    def __init__(
        self,
        spec: EngineSpec,
        world: World,
        module: nn.Module,
        config: dict[str, Any],
        initialize: Initialize,
        undo: list[Undo],
    ) -> None:
        self._config = config
        self._initialize = initialize
        self._group_names: list[tuple[str, ...]] = []
        self._deepspeed: Any = None
        self._unused: Unused | None = None
        super().__init__(spec, world, module.to(world.device), undo=undo)
        if self._mixed:
            self._undo.append(_autocast_forward(module, world.device.type, self._dtype))

    def _build_optimizer(self) -> Optimizer:
        optimizer = super()._build_optimizer()
        # ZeRO puts its flat partitions in their place.
        self._group_names = group_names(self.module, optimizer)
        with quiet_framework(*framework.LOGGERS):
            self._deepspeed, release = self._initialize(self.module, optimizer, self._config)
        named = self.module.named_parameters()
        self._unused = Unused({name: p for name, p in named if p.requires_grad}, self.world)
        self._undo.append(self._unused.stop)
        self._undo.append(refuse_inner_gradients(self.module, "deepspeed"))
        self._undo.append(release)
        self._model = self._deepspeed
        return optimizer

    @property
    def _averaged_over(self) -> int:
        """How many ranks DeepSpeed has divided gradients by: 1 where it sums, as it is asked to."""
        return self.world.size if self._deepspeed.gradient_average else 1

    def _clear(self) -> None:
        super()._clear()
        if self._unused is not None:
            self._unused.clear()

    def _backward(self, loss: torch.Tensor) -> None:
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        self._deepspeed.backward(loss, scale_wrt_gas=False)

    def close(self) -> None:
        super().close()
        if self._deepspeed is not None:
            self._deepspeed.destroy()
            self._deepspeed = None
            self._model = self.module
            # Its hooks and its parameters hold each other, and threads of gloo's hold on to both.
            gc.collect()


class ReplicaEngine(DeepSpeedEngine):
    """Stage 0: DeepSpeed sums the gradients, and the optimizer is the user's own."""

    def _finish_gradients(self) -> None:
        size = self._config["zero_optimization"]["reduce_bucket_size"]
        assert self._unused is not None
        unused = self._unused.take()
        self._deepspeed.buffered_allreduce_fallback(elements_per_buffer=size)
        if self._averaged_over != 1:
            self._scale_gradients(self._averaged_over)
        for name in unused:
            # DeepSpeed has made them a gradient of zero, which the optimizer would decay them by.
            self.module.get_parameter(name).grad = None


def _autocast_forward(module: nn.Module, device_type: str, dtype: torch.dtype) -> Undo:
    """Autocast inside DeepSpeed's forward, which turns off any that is around it."""
    own = module.__dict__.get("forward")
    forward = module.forward

    @functools.wraps(forward)
    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype):
            return forward(*args, **kwargs)

    module.forward = under_autocast

    def undo() -> None:
        if own is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = own

    return undo
