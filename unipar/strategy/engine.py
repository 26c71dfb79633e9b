"""An engine: one model under a strategy, and what the user asked of it."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unipar.data.batch import Batch, MicroBatch
from unipar.errors import ConfigError
from unipar.loss import Loss, LossFn, LossSum
from unipar.optimizers.factories import OptimizerFactory, SchedulerFactory
from unipar.optimizers.named import NamedOptimizer
from unipar.state import EngineState, StateSource
from unipar.strategy.initial import InitialValues, InitialWeights, whole_model
from unipar.strategy.loss_scale import LossScale
from unipar.strategy.step_result import StepResult
from unipar.world import World

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
OnNaN = Literal["raise", "skip", "ignore"]
DropoutSeed = Literal["rank", "sample"]
ActivationCheckpointing = Literal["off", "full", "selective"] | tuple[str, ...]
Parallelize = Callable[[nn.Module, World], None]


@dataclass(frozen=True)
class EngineSpec:
    """A user's request for one engine.

    Attributes:
        model: a module, or a function without arguments that builds one.
        optimizer: factory called with the named parameters once they have their final form;
            ``None`` for a model that is only evaluated.
        lr_scheduler: factory called with the optimizer.
        precision: the compute dtype; ``"fp8"`` is bf16 with linear layers in float8.
        loss_scale: how the scale of fp16 losses begins and changes; ``None``: as PyTorch's does.
        max_grad_norm: the 2-norm that gradients are clipped to; ``inf`` measures without clipping.
        activation_checkpointing: ``"off"``; ``"full"`` or ``"selective"`` (each repeated block; the
            second keeps what takes long to compute); or names of module classes whose activations
            are recomputed.
        activation_offload: whether what repeated blocks save for the backward pass waits for it in
            host memory.
        compile: ``False``, ``True``, or keyword arguments for :meth:`torch.nn.Module.compile`.
        parallelize: the user's own way of dividing parts of the model, called with the module and
            the world before the strategy divides the rest.
        on_nan: what to do when the loss of a step is not finite.
        seed: the seed that a model function runs under.
        dropout_seed: whether dropout draws for each rank, or for each sample.
        initial_weights: those that a model function gives the model; or that each tensor is given
            by itself, by its name, or from what is stored.
        global_batch_size: samples of a full step over all ranks, if known.
        micro_batch_size: the most samples of one forward pass on any rank, if known; a rank may
            be given fewer.
        accumulation: micro-batches of a full step, if known.
        name: the engine's name in checkpoints.
    """

    model: nn.Module | Callable[[], nn.Module]
    optimizer: OptimizerFactory | None = None
    lr_scheduler: SchedulerFactory | None = None
    precision: Precision = "fp32"
    loss_scale: LossScale | None = None
    max_grad_norm: float | None = None
    activation_checkpointing: ActivationCheckpointing = "off"
    activation_offload: bool = False
    compile: bool | dict[str, Any] = False
    parallelize: Parallelize | None = None
    on_nan: OnNaN = "raise"
    seed: int = 0
    dropout_seed: DropoutSeed = "rank"
    initial_weights: InitialWeights = "model"
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    accumulation: int | None = None
    name: str = "model"

    @property
    def named_optimizer(self) -> NamedOptimizer | None:
        """The name and the arguments of the optimizer, for a framework that has its own of it.

        ``None`` where no name was given, but a function, or several optimizers. Checks that the
        core and ``with_divisible_optimizer`` have put around the factory are looked through, as
        around any function that has ``__wrapped__``; where a framework builds the optimizer itself,
        they are not made.
        """
        found = None if self.optimizer is None else inspect.unwrap(self.optimizer)
        return found if isinstance(found, NamedOptimizer) else None


def seeded_model(spec: EngineSpec) -> nn.Module:
    """The model itself, or what its function builds on the host under ``spec.seed``.

    Raises:
        ConfigError, CheckpointError: as :func:`initial_values`.
    """
    if isinstance(spec.model, nn.Module):
        return spec.model
    values = initial_values(spec)
    if values is not None:
        return whole_model(values)
    # Seeding is of GPUs, too, and some strategies build the values on rank 0 alone.
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(spec.seed)
        return spec.model()


def initial_values(spec: EngineSpec) -> InitialValues | None:
    """The values that each process computes or reads for itself; ``None`` for a whole model's.

    Raises:
        ConfigError: the model function computes what cannot be computed one tensor at a time.
        CheckpointError: stored weights are damaged, or of another model.
    """
    if isinstance(spec.model, nn.Module) or spec.initial_weights == "model":
        return None
    stored = None if spec.initial_weights == "by_name" else spec.initial_weights
    return InitialValues(spec.model, spec.seed, stored)


class Engine(ABC):
    """One model under a strategy.

    Attributes:
        module: the user's module, without the framework's wrapper around it; in a pipeline the
            stages that this rank has, whose layers go by the names that they have in the user's.
        optimizer: what holds the hyperparameters, or ``None``.
        lr_scheduler: the scheduler, stepped once for each optimizer step that was not skipped. A
            ``ReduceLROnPlateau`` waits for its metric: ``fit`` steps it at evaluations, and one's
            own loop by ``engine.lr_scheduler.step(metric)``, with the same metric on every rank.
        spec: what the engine was asked for.
        num_steps: training steps taken, skipped ones included; restored from checkpoints.
        sharing: the other engines of the session that have parameters in common with this one.
    """

    module: nn.Module
    optimizer: Optimizer | None = None
    lr_scheduler: LRScheduler | None = None
    spec: EngineSpec
    num_steps: int = 0
    sharing: tuple[Engine, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters of the whole model, however they are divided."""
        return sum(parameter.numel() for parameter in self.module.parameters())

    @abstractmethod
    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        """Forward, backward and update on one global batch. Collective.

        Where ``max_grad_norm`` is set, a gradient may be found not to be finite only after the
        call, on the device. It leaves weights and optimizer as they are then, and the error is
        raised where the result is read, by :meth:`check_last_step`, or within the next step, which
        is not taken either.

        Raises:
            ConfigError: the loss is no scalar or has no gradient.
            NonFiniteLossError: the loss, or the norm of this step's gradient or of the last one's,
                is not finite and ``on_nan`` is ``"raise"``; weights, optimizer and scheduler are
                then as they were before the step that the error names.
        """

    def check_last_step(self) -> None:
        """Wait until it is known that the last step was taken. Collective.

        Called before anything that must not build on a step that was not: an evaluation, a
        checkpoint, the end of a session.

        Raises:
            NonFiniteLossError: it was not; raised once, and not if reading its result has done so.
        """
        return

    def rest(self) -> None:
        """Put into the model the weights that it is evaluated with, until the next step.

        Of an optimizer that steps by others, as schedule-free ones do, and has ``train()`` and
        ``eval()`` for it. Evaluations begin with it.
        """
        return

    @abstractmethod
    def eval_batch(self, batch: Batch, loss_fn: LossFn) -> LossSum:
        """This rank's loss on one batch, without gradients. Collective where sharded.

        ``loss_fn`` is called once for each micro-batch, in their order; in a pipeline on the last
        stage alone. Padding (``num_samples == 0``) is run and counts nothing.
        """

    @abstractmethod
    def probe(self, microbatch: MicroBatch, loss_fn: LossFn) -> None:
        """Forward and backward whose gradients are thrown away: does it fit, how long does it take?

        Raises:
            torch.OutOfMemoryError: it does not. Nothing has changed.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward pass (only with ``capabilities.custom_loop``).

        In the compute dtype, and through what the framework has wrapped around the module: calling
        :attr:`module` instead would go past it. Inputs are to be on ``world.device``.
        """
        raise ConfigError(
            f"{type(self).__name__} takes whole steps only: call engine.train_step(batch, loss_fn)."
        )

    def backward(
        self,
        loss: Loss,
        *,
        num_items: float | None = None,
        likely_last: bool = False,
        same_parameters: bool = False,
        run: Callable[[], None] | None = None,
    ) -> None:
        """Add a micro-batch's gradients (only with ``capabilities.custom_loop``).

        Args:
            loss: a mean over ``num_items``, or a :class:`LossSum`.
            num_items: how many items the mean is over; required with a mean, since micro-batches
                and ranks of unequal size must not count alike.
            likely_last: whether :meth:`step` is likely to come next, on every rank alike, where
                :meth:`microbatch` does not tell. The loss is then summed over ranks while this pass
                runs. If another pass follows all the same, on every rank, it is summed once more.
            run: what runs the backward pass in the place of this engine: another one's, for a loss
                that trains both their models. Only where gradients are whole.
            same_parameters: whether a pass that is likely the last gives gradients to the same
                parameters on every rank, as DDP asks. Under DDP gradients are then summed, too.
        """
        raise ConfigError(
            f"{type(self).__name__} takes whole steps only: call engine.train_step(batch, loss_fn)."
        )

    def microbatch(self, *, last: bool) -> AbstractContextManager[None]:
        """Say which micro-batch is the last (only with ``capabilities.custom_loop``).

        Put forward and backward pass of each micro-batch into ``with engine.microbatch(last=…)``,
        and gradients are reduced while the last backward pass computes them. Without it,
        :meth:`step` reduces what all backward passes have left, in whatever order they came.

        Args:
            last: whether :meth:`step` comes next; the same on every rank.
        """
        raise ConfigError(
            f"{type(self).__name__} takes whole steps only: call engine.train_step(batch, loss_fn)."
        )

    def step(self, *, max_grad_norm: float | None = None) -> StepResult:
        """Reduce, clip, update and clear what :meth:`backward` has added since the last step.

        Args:
            max_grad_norm: the 2-norm that gradients of this step are clipped to (only with
                ``capabilities.clipping``); left out: what :attr:`spec` says.
        """
        raise ConfigError(
            f"{type(self).__name__} takes whole steps only: call engine.train_step(batch, loss_fn)."
        )

    def zero_grad(self) -> None:
        """Give up the step that has begun (only with ``capabilities.custom_loop``).

        What :meth:`backward` has added is dropped before the next step. Call it on every rank, also
        after an error in a forward or backward pass; without a step begun it does nothing.
        """
        raise ConfigError(
            f"{type(self).__name__} takes whole steps only: call engine.train_step(batch, loss_fn)."
        )

    @abstractmethod
    def export_state(self) -> EngineState:
        """Describe this engine's state, nothing gathered or copied. Collective."""

    @abstractmethod
    def import_state(self, source: StateSource, *, optimizer: bool = True) -> None:
        """Take over a stored state, of any strategy and world size. Collective.

        Args:
            source: the stored state.
            optimizer: whether to restore optimizer, scheduler and scaler too.

        Raises:
            CheckpointError: the stored state does not fit this model or optimizer.
        """

    def close(self) -> None:
        """Undo what was done to the user's module, as far as can be. Not collective."""
        return
