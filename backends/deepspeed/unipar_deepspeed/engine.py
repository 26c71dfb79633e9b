"""DeepSpeed's engine; and stage 0, where every rank keeps everything."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unipar.engine import PrecisionPolicy, Reducer, Undo, replace_forward, scale_gradients
from unipar.world import World
from unipar_deepspeed import framework
from unipar_deepspeed.unused import Unused

Initialize = Callable[[nn.Module, Optimizer, dict[str, Any]], tuple[Any, Undo]]
"""Makes DeepSpeed's engine of module, optimizer and configuration; and what lets go of it again."""


def initialize(module: nn.Module, optimizer: Optimizer, config: dict[str, Any]) -> tuple[Any, Undo]:
    """``deepspeed.initialize``, as one would call it."""
    engine, *_ = framework.load().initialize(model=module, optimizer=optimizer, config=config)
    return engine, lambda: None


class Initialized:
    """DeepSpeed's engine until it is closed. What needs it asks here, and does not keep it.

    DeepSpeed is kept in fp32, and half precision is autocast's around it: weights, moments and
    reductions stay fp32, as in every strategy.

    Args:
        engine: of DeepSpeed's.
        world: the joined processes.

    Attributes:
        engine: of DeepSpeed's.
        averaged_over: how many ranks DeepSpeed has divided gradients by: 1 where it sums, as it is
            asked to.
    """

    def __init__(self, engine: Any, world: World) -> None:
        self.engine: Any = engine
        self.averaged_over = world.layout.batch if engine.gradient_average else 1

    @property
    def zero(self) -> Any:
        """DeepSpeed's optimizer, from stage 1 on."""
        return self.engine.optimizer

    def backward(self, loss: torch.Tensor) -> None:
        """A backward pass that divides by nothing."""
        self.engine.backward(loss, scale_wrt_gas=False)

    def close(self) -> None:
        """Take DeepSpeed's hooks off the module, and let go of it."""
        self.engine.destroy()
        # DeepSpeed 0.19.8, runtime/engine.py: these two stay, and hold the engine.
        self.engine.module_forward_pre_hook.remove()
        self.engine.module_forward_post_hook.remove()
        if self.engine.zero_optimization_partition_weights():
            _forget(self.engine.module)
        self.engine = None
        # Its hooks and its parameters hold each other, and threads of gloo's hold on to both.
        gc.collect()


def _forget(module: nn.Module) -> None:
    """Let go of what DeepSpeed keeps of stage 3 until the process ends: model, optimizer, groups.

    DeepSpeed 0.19.8, runtime/zero/: in parameter_offload.py the model stays on a stack of modules,
    and in partitioned_param_coordinator.py a method's cache holds whom it was called for.
    """
    from deepspeed.runtime.zero import parameter_offload  # pyright: ignore
    from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator  # pyright: ignore

    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [other for other in stack if other is not module]
    method: Any = vars(coordinator.PartitionedParameterCoordinator)[
        "_PartitionedParameterCoordinator__params_to_release"
    ]
    inspect.getclosurevars(method).nonlocals["func"].cache_clear()


class ReplicaReducer(Reducer):
    """Stage 0: DeepSpeed sums the gradients, and the optimizer is the user's own.

    Args:
        module: the user's module.
        world: the joined processes.
        deepspeed: runs backward passes and reductions.
        bucket_size: elements that are summed at a time.
    """

    def __init__(
        self, module: nn.Module, world: World, deepspeed: Initialized, bucket_size: int
    ) -> None:
        super().__init__(module, world, deepspeed.backward)
        self._deepspeed, self._bucket_size = deepspeed, bucket_size
        self._unused = Unused(module, world, alike=False)

    def finish(self) -> None:
        unused = self._unused.take()
        self._deepspeed.engine.buffered_allreduce_fallback(elements_per_buffer=self._bucket_size)
        scale_gradients(self.module.parameters(), self._deepspeed.averaged_over)
        for name in unused:
            # DeepSpeed has made them a gradient of zero, which the optimizer would decay them by.
            self.module.get_parameter(name).grad = None

    def forget(self) -> None:
        self._unused.clear()

    def close(self) -> None:
        self._unused.stop()


def autocast_forward(module: nn.Module, precision: PrecisionPolicy) -> Undo:
    """Autocast inside DeepSpeed's forward, which turns off any that is around it."""
    if not precision.autocasts:
        return lambda: None
    forward = module.forward

    @functools.wraps(forward)
    def under_autocast(*args: Any, **kwargs: Any) -> Any:
        with precision.forward():
            return forward(*args, **kwargs)

    return replace_forward(module, under_autocast)
