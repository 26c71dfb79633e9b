"""The seam between the training loop and a framework: a whole training step.

A :class:`Strategy` is made once for a run and prepares one :class:`Engine` for each model. The loop
calls :meth:`Engine.train_step` with all micro-batches of a step, because a pipeline schedule or a
framework that counts its own accumulation cannot be cut any finer.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unipar.data.batch import Batch, MicroBatch
from unipar.errors import ConfigError
from unipar.layout import Layout
from unipar.loss import Loss, LossFn, LossSum
from unipar.optimizers.factories import OptimizerFactory, SchedulerFactory
from unipar.optimizers.named import NamedOptimizer
from unipar.state import EngineState, StateSource
from unipar.world import Placement, World, join

Precision = Literal["fp32", "bf16", "fp16", "fp8"]
OnNaN = Literal["raise", "skip", "ignore"]


@dataclass(frozen=True)
class ModelContext:
    """What a model function is told of where its model will be, if it takes an argument.

    Attributes:
        layout: how the processes of the run are arranged.
        stage: of a pipeline, the one that this process has, from 0.
        device: where the strategy will move the model; building it there saves nothing.
    """

    layout: Layout
    stage: int
    device: torch.device


ModelFactory = Callable[[], nn.Module] | Callable[[ModelContext], nn.Module]


def takes_context(function: ModelFactory) -> bool:
    """Whether a model function has one parameter, without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # Some built-in functions have none.
        return False
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.default is p.empty and p.kind in places]
    return len(needed) == 1


def build_model(function: ModelFactory, context: ModelContext | None = None) -> nn.Module:
    """What a model function builds.

    Args:
        function: the user's.
        context: what it is told, if it takes an argument; left out: of one process, on the host.
    """
    build: Callable[..., nn.Module] = function
    if not takes_context(function):
        return build()
    return build(context or ModelContext(Layout(), 0, torch.device("cpu")))


Parallelize = Callable[[nn.Module, World], None]


@dataclass(frozen=True)
class Capabilities:
    """What a strategy, with the options it was given, can do. Anything else is a ConfigError.

    Attributes:
        precisions: the compute dtypes; weights and reductions stay fp32 in all of them, unless
            ``half_weights``.
        device_types: where it runs.
        max_devices: the most processes it takes, or ``None`` for any number.
        sharded: what is divided among ranks: ``parameters``, ``gradients``, ``optimizer``.
        offload: what can live in host memory: ``parameters``, ``optimizer``.
        custom_loop: whether :meth:`Engine.backward` and :meth:`Engine.step` exist.
        accumulation: whether a step may have several micro-batches.
        several_engines: whether one session may prepare several models.
        clipping: whether ``max_grad_norm`` is honored.
        activation_checkpointing: whether activations can be recomputed.
        compile: whether ``torch.compile`` is honored.
        parallelize: whether a user may divide parts of the model himself.
        pipeline: whether a step is a pipeline schedule, which takes losses in parts only
            (:class:`unipar.Objective`).
        skip_nan: whether a step with a non-finite loss can be skipped (``on_nan="skip"``).
        half_weights: whether ``bf16`` and ``fp16`` round the weights that compute, buffers
            included, and the gradients; the optimizer updates fp32 weights beside them. Elsewhere
            half precision is autocast's, which rounds neither.
        splits_tensors: whether the optimizer is given parts of tensors. Preparing an engine then
            refuses one that would update parts otherwise than the whole, and two engines of a
            session may have no parameter in common.
        sparse_gradients: whether gradients may be sparse (``nn.Embedding(…, sparse=True)``).
    """

    precisions: frozenset[Precision]
    device_types: frozenset[str]
    max_devices: int | None = None
    sharded: frozenset[str] = frozenset()
    offload: frozenset[str] = frozenset()
    custom_loop: bool = True
    accumulation: bool = True
    several_engines: bool = True
    clipping: bool = True
    activation_checkpointing: bool = True
    compile: bool = True
    parallelize: bool = False
    pipeline: bool = False
    skip_nan: bool = True
    half_weights: bool = False
    splits_tensors: bool = False
    sparse_gradients: bool = True


class StrategyOptions(BaseModel):
    """Base of every strategy's typed options. Subclasses document each field."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    strategy: ClassVar[str]
    """The strategy's registered name."""


class Availability(NamedTuple):
    """Whether a strategy can run in this environment.

    Attributes:
        ok: whether it can.
        reason: if not, what is missing.
        remedy: the command or change that mends it.
    """

    ok: bool
    reason: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class EngineSpec:
    """What the user asked of one engine.

    Attributes:
        model: a module, or a function without arguments that builds one.
        optimizer: factory called with the named parameters once they have their final form;
            ``None`` for a model that is only evaluated.
        lr_scheduler: factory called with the optimizer.
        precision: the compute dtype; ``"fp8"`` is bf16 with linear layers in float8.
        max_grad_norm: the 2-norm that gradients are clipped to; ``inf`` measures without clipping.
        activation_checkpointing: ``"off"``, ``"full"`` (each repeated block), or names of module
            classes whose activations are recomputed.
        compile: ``False``, ``True``, or keyword arguments for :meth:`torch.nn.Module.compile`.
        parallelize: the user's own way of dividing parts of the model, called with the module and
            the world before the strategy divides the rest.
        on_nan: what to do when the loss of a step is not finite.
        seed: the seed that a model function runs under.
        global_batch_size: samples of a full step over all ranks, if known.
        micro_batch_size: samples of one forward pass on one rank, if known.
        accumulation: micro-batches of a full step, if known.
        name: the engine's name in checkpoints.
    """

    model: nn.Module | Callable[[], nn.Module]
    optimizer: OptimizerFactory | None = None
    lr_scheduler: SchedulerFactory | None = None
    precision: Precision = "fp32"
    max_grad_norm: float | None = None
    activation_checkpointing: Literal["off", "full"] | tuple[str, ...] = "off"
    compile: bool | dict[str, Any] = False
    parallelize: Parallelize | None = None
    on_nan: OnNaN = "raise"
    seed: int = 0
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


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one training step did; equal on every rank.

    Attributes:
        loss: mean over all items of the global batch, before the update.
        num_items: how many items that is: samples, or the counts of :class:`LossSum`.
        grad_norm: 2-norm of the whole gradient before clipping; ``None`` unless
            ``max_grad_norm`` is set.
        skipped: whether the optimizer did not step (fp16 overflow, or ``on_nan="skip"``).
    """

    loss: float
    num_items: float
    grad_norm: float | None = None
    skipped: bool = False


class Engine(ABC):
    """One model under a strategy.

    Attributes:
        module: the user's module, without the framework's wrapper around it.
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

        Raises:
            ConfigError: the loss is no scalar or has no gradient.
            NonFiniteLossError: the loss is not finite and ``on_nan`` is ``"raise"``; weights and
                optimizer are then as they were before the step.
        """

    @abstractmethod
    def eval_batch(self, batch: Batch, loss_fn: LossFn) -> LossSum:
        """This rank's loss on one batch, without gradients. Collective where sharded.

        ``loss_fn`` is called once for each micro-batch, in their order; in a pipeline on the last
        stage alone. Padding (``num_samples == 0``) is run and counts nothing.
        """

    @abstractmethod
    def probe(self, microbatch: MicroBatch, loss_fn: LossFn) -> None:
        """Forward and backward whose gradients are thrown away, to see if it fits in memory.

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

    def backward(self, loss: Loss, *, num_items: float | None = None) -> None:
        """Add a micro-batch's gradients (only with ``capabilities.custom_loop``).

        Args:
            loss: a mean over ``num_items``, or a :class:`LossSum`.
            num_items: how many items the mean is over; required with a mean, since micro-batches
                and ranks of unequal size must not count alike.
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

    def step(self) -> StepResult:
        """Reduce, clip, update and clear what :meth:`backward` has added since the last step."""
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


class Strategy(ABC):
    """A framework behind the seam. Importing one must not import its framework.

    What only some frameworks offer is no part of it: a feature that needs more of a strategy has a
    protocol of its own, and takes every strategy with the protocol's methods.
    """

    name: ClassVar[str]
    options_type: ClassVar[type[StrategyOptions]]
    rewrites_module: ClassVar[bool] = False
    """Whether :meth:`prepare` changes a module beyond use outside of the run."""

    def __init__(self, options: StrategyOptions) -> None:
        self.options = options

    @classmethod
    def availability(cls) -> Availability:
        """Whether the framework is installed and usable, found without importing it."""
        return Availability(ok=True)

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What this strategy can do with these options."""

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        """Refuse what :class:`Capabilities` cannot express, before any process starts.

        ``placement.size`` is the number of processes there will be.

        Raises:
            ConfigError: these options do not fit this run.
        """
        return

    def layout(self, placement: Placement) -> Layout:
        """How the processes of the run are arranged: unless overridden as replicas, one each.

        Known before any process starts; ``placement.size`` is the number there will be. It says how
        many shares a global batch falls into, and which ranks hold parts of one replica.

        Raises:
            ConfigError: that number of processes cannot be arranged as the options ask.
        """
        return Layout(dp_replicate=placement.size)

    def setup(self, placement: Placement) -> World:
        """Join the run's processes, arranged as :meth:`layout` says. Collective."""
        return join(placement, self.layout(placement))

    @abstractmethod
    def prepare(self, spec: EngineSpec, world: World) -> Engine:
        """Wrap a model, then build its optimizer and scheduler. Collective."""

    def explain(self, error: BaseException) -> str:
        """What an error of the framework's own means, and what to do; empty if it is not known.

        A session that ends with the error raises a :class:`ConfigError` of these words from it.
        """
        return ""

    def teardown(self) -> None:
        """Release what :meth:`setup` took, apart from the world."""
        return


def seeded_model(spec: EngineSpec) -> nn.Module:
    """The model itself, or what its function builds on the host under ``spec.seed``."""
    if isinstance(spec.model, nn.Module):
        return spec.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        return spec.model()
