"""The training step through an Accelerator."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from unipar.engine import (
    AsDTensors,
    DDPReducer,
    OptimizerStepper,
    PrecisionPolicy,
    Reducer,
    SeenReplica,
    StepEngine,
    Trail,
    Undo,
    build_optimizer,
    check_divisible,
    has_overflowed,
    keep_scale_on_host,
    keep_weights_in_place,
    refuse_changed_weights,
    refuse_inner_gradients,
    scale_gradients,
    see_calls,
    sum_shards,
)
from unipar.engine.sharded import discard_gradients, refuse_uses_outside
from unipar.errors import ConfigError
from unipar.state import is_dtensor
from unipar.strategy import EngineSpec
from unipar.utils.torch_versions import recovering
from unipar.world import World
from unipar_accelerate.accelerator import check_wrapped, of_views
from unipar_accelerate.framework import quiet

if TYPE_CHECKING:
    from accelerate import Accelerator

    from unipar_accelerate.options import AccelerateOptions


class AccelerateEngine(StepEngine):
    """Model and optimizer as ``Accelerator.prepare`` gives them back.

    Attributes:
        accelerator: Accelerate's own, for what else a user's code does with one: ``print``,
            ``gather``, trackers, ``is_main_process``. Each engine has one; they share their state.
    """

    accelerator: Accelerator


def prepare_replica(
    spec: EngineSpec,
    world: World,
    module: nn.Module,
    accelerator: Accelerator,
    options: AccelerateOptions,
    undo: list[Undo],
) -> AccelerateEngine:
    """A replica under DDP, unless the process is alone. Collective."""
    optimizer = build_optimizer(spec, module, may_fuse=True)
    undo = [partial(_free, accelerator), *undo, _restored(module)]
    prepared: Any = None
    with quiet():
        if optimizer is None:
            model = accelerator.prepare_model(module, evaluation_mode=True)
        else:
            model, prepared = accelerator.prepare(module, optimizer)
    check_wrapped(accelerator, options, model, world)
    backward = partial(_backward, accelerator)
    reducer = Reducer(module, world, backward)
    if isinstance(model, DistributedDataParallel):
        hook = options.compression
        reducer = DDPReducer(
            model,
            world,
            allow_unused="accelerate:find_unused_parameters=true",
            only_overlapped="" if hook == "none" else f"accelerate:compression={hook}",
            averages=hook != "none",
            run_backward=backward,
        )
        model = SeenReplica(module, model)
        accelerator.unwrap_model = of_views(accelerator.unwrap_model)
    return _engine(spec, world, module, optimizer, accelerator, model, prepared, reducer, undo)


def prepare_shards(
    spec: EngineSpec,
    world: World,
    module: nn.Module,
    accelerator: Accelerator,
    options: AccelerateOptions,
    undo: list[Undo],
) -> AccelerateEngine:
    """Shards under the FSDP2 plugin. Collective."""
    from torch.distributed.fsdp import FSDPModule

    optimizer = build_optimizer(spec, module)
    undo = [partial(_free, accelerator), *undo, _restored(module)]
    # The second backward pass needs weights that FSDP2 has let go of after the first one.
    undo.append(refuse_inner_gradients(module, "accelerate", only_graphs=True))
    # FSDP2 is prepared with an optimizer, or not at all.
    steps = optimizer or torch.optim.SGD(module.parameters(), lr=0.0)
    with quiet():
        model, prepared = accelerator.prepare(module, steps)
    check_wrapped(accelerator, options, model, world)
    if options.cpu_offload and accelerator.scaler is not None:
        keep_scale_on_host(accelerator.scaler)
    sum_shards(module)
    check_divisible(steps, "accelerate", world, AsDTensors(comes_first=False))
    units = [part for part in module.modules() if isinstance(part, FSDPModule)]
    undo.append(keep_weights_in_place(module))
    # Of a shard what is changed stays changed; what a pass gathers is let go.
    undo.append(
        refuse_changed_weights(module, "accelerate", units, lambda weight: not is_dtensor(weight))
    )
    undo += refuse_uses_outside(module, "accelerate")
    reducer = ShardReducer(module, world, accelerator)
    return _engine(spec, world, module, optimizer, accelerator, model, prepared, reducer, undo)


def _engine(
    spec: EngineSpec,
    world: World,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    accelerator: Accelerator,
    model: nn.Module,
    prepared: Any,
    reducer: Reducer,
    undo: list[Undo],
) -> AccelerateEngine:
    precision = AcceleratePrecision(spec.precision, world.device, scaler=accelerator.scaler)
    stepper = None
    if optimizer is not None:
        stepper = AccelerateStepper(optimizer, precision, module, accelerator, prepared)
    engine = AccelerateEngine(
        spec,
        world,
        module,
        optimizer,
        model=model,
        loop_model=module if isinstance(reducer, DDPReducer) else model,
        reducer=reducer,
        precision=precision,
        stepper=stepper,
        undo=undo,
    )
    engine.accelerator = accelerator
    return engine


class AcceleratePrecision(PrecisionPolicy):
    """Scales in ``accelerator.backward``; unscales where Accelerate clips, or else steps."""

    # Accelerate hangs one of its own on the model's forward pass, or has FSDP round weights.
    may_leave_out = False

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        pass


class AccelerateStepper(OptimizerStepper):
    """Clips by the Accelerator, and steps what it has made of the optimizer.

    Args:
        optimizer: the user's.
        precision: of the engine.
        module: whose parameters are clipped.
        accelerator: what has prepared them.
        prepared: what it has made of the optimizer.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        precision: PrecisionPolicy,
        module: nn.Module,
        accelerator: Accelerator,
        prepared: Any,
    ) -> None:
        # Accelerate knows an FSDP2 model by the list of all its parameters, frozen ones included.
        super().__init__(optimizer, precision, module.parameters())
        self._accelerator, self._prepared = accelerator, prepared

    def clip(self, max_norm: float, factor: float = 1.0) -> torch.Tensor:
        scale_gradients(self.parameters, factor)
        norm: Any = self._accelerator.clip_grad_norm_(self.parameters, max_norm)
        return norm.full_tensor() if is_dtensor(norm) else norm

    def update(self) -> bool:
        _check_shared_state(self._accelerator)
        scaler = self.precision.scaler
        fused = any(group.get("fused") for group in self.optimizer.param_groups)
        if scaler is None or not fused:
            self._prepared.step()
            return not self._prepared.step_was_skipped
        # Accelerate 1.15 (optimizer.py, step) takes a step as taken if the scaler has called the
        # optimizer, which it does in every step of a fused one. And a scale need not change.
        inner = self._prepared.optimizer
        if not scaler._per_optimizer_states[id(inner)]["found_inf_per_device"]:
            scaler.unscale_(inner)
        overflowed = has_overflowed(scaler, inner)
        self._prepared.step()
        return not overflowed


class ShardReducer(Reducer):
    """Gradients are reduce-scattered by FSDP2 in the last backward pass."""

    # Between micro-batches they are inside FSDP; and a DTensor does not tell of all changes.
    hides_gradients = True
    calls_hooks = False

    def __init__(self, module: nn.Module, world: World, accelerator: Accelerator) -> None:
        super().__init__(module, world, partial(_backward, accelerator))
        self._accelerator = accelerator
        self.trail = self._trail = Trail("accelerate", world, dict(module.named_parameters()))
        self._undo = see_calls(module, "accelerate", self._trail)

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if last else self._accelerator.no_sync(self.module)

    def finish(self) -> None:
        self._trail.look()

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()

    def discard(self) -> None:
        # Those that were not reduced are inside FSDP.
        discard_gradients(self.module, "accelerate")
        self._trail.clear()
        super().discard()

    def probing(self) -> AbstractContextManager[None]:
        return recovering(self.module, "accelerate")


def _free(accelerator: Accelerator) -> None:
    accelerator.free_memory()


def _backward(accelerator: Accelerator, loss: torch.Tensor) -> None:
    _check_shared_state(accelerator)
    accelerator.backward(loss)


def _check_shared_state(accelerator: Accelerator) -> None:
    """Refuse what another Accelerator may have set for all of them, which is not seen else.

    It would divide the loss once more, and leave steps out.
    """
    steps = accelerator.gradient_accumulation_steps
    synced = accelerator.sync_gradients
    if steps == 1 and synced:
        return
    raise ConfigError(
        f"accelerate: gradient_accumulation_steps={steps} (sync_gradients={synced}) was set in "
        "this process, by an Accelerator of your own or on engine.accelerator, and all "
        "Accelerators share it. Micro-batches are unipar's: set micro_batch_size, and leave "
        "gradient_accumulation_steps at 1 and accumulate() out."
    )


def _restored(module: nn.Module) -> Undo:
    """Takes back what ``prepare`` sets on the module: a marked one would not be prepared again."""
    before = module.__dict__.get("forward")

    def undo() -> None:
        for name in ("_original_forward", "_is_accelerate_prepared", "forward"):
            module.__dict__.pop(name, None)
        if before is not None:
            module.forward = before

    return undo
