"""The seam between the training loop and a framework: a whole training step.

A :class:`Strategy` is made once for a run and prepares one :class:`Engine` for each model. The loop
calls :meth:`Engine.train_step` with all micro-batches of a step, because a pipeline schedule or a
framework that counts its own accumulation cannot be cut any finer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from unipar.layout import Layout
from unipar.strategy.engine import Engine, EngineSpec, Precision
from unipar.world import Placement, World, join

SelfTest = Literal["auto"] | bool


@dataclass(frozen=True)
class Capabilities:
    """The abilities of a strategy with its options. Anything else is a ConfigError.

    Attributes:
        precisions: the compute dtypes; weights and reductions stay fp32 in all of them, unless
            ``half_weights``.
        device_types: where it runs.
        max_devices: the most processes it takes, or ``None`` for any number.
        sharded: what is divided among ranks: ``parameters``, ``gradients``, ``optimizer``.
        offload: what can live in host memory: ``parameters``, ``optimizer``, ``activations``.
        custom_loop: whether :meth:`Engine.backward` and :meth:`Engine.step` exist.
        accumulation: whether a step may have several micro-batches.
        several_engines: whether one session may prepare several models.
        clipping: whether ``max_grad_norm`` is honored.
        activation_checkpointing: whether activations can be recomputed.
        selective_checkpointing: whether outputs of some operations can be kept meanwhile.
        compile: whether ``torch.compile`` is honored.
        parallelize: whether a user may divide parts of the model himself.
        pipeline: whether a step is a pipeline schedule, which takes losses in parts only
            (:class:`unipar.Objective`).
        skip_nan: whether a step with a non-finite loss can be skipped (``on_nan="skip"``).
        half_weights: whether ``bf16`` and ``fp16`` round the weights that compute, buffers
            included, and the gradients; the optimizer updates fp32 weights beside them. Elsewhere
            half precision is autocast's, which rounds neither, or as near to fp32 as that.
        splits_tensors: whether the optimizer is given parts of tensors. Preparing an engine then
            refuses one that would update parts otherwise than the whole, and two engines of a
            session may have no parameter in common.
        sparse_gradients: whether gradients may be sparse (``nn.Embedding(…, sparse=True)``).
        sample_dropout: whether each rank computes whole samples, by PyTorch's own dropout and
            nothing that draws random numbers beside it, so that dropout may draw for each sample
            (``dropout_seed="sample"``).
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
    selective_checkpointing: bool = False
    compile: bool = True
    parallelize: bool = False
    pipeline: bool = False
    skip_nan: bool = True
    half_weights: bool = False
    splits_tensors: bool = False
    sparse_gradients: bool = True
    sample_dropout: bool = False


class StrategyOptions(BaseModel):
    """Base of every strategy's typed options. Subclasses document each field."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    strategy: ClassVar[str]
    """The strategy's registered name."""


class Availability(NamedTuple):
    """The availability of a strategy in this environment.

    Attributes:
        ok: whether it can.
        reason: if not, what is missing.
        remedy: the command or change that fixes it.
    """

    ok: bool
    reason: str = ""
    remedy: str = ""


class Strategy(ABC):
    """A framework behind the seam. Importing one must not import its framework.

    What only some frameworks offer is no part of it: a feature that needs more of a strategy has a
    protocol of its own, and takes every strategy with the protocol's methods.
    """

    name: ClassVar[str]
    options_type: ClassVar[type[StrategyOptions]]
    rewrites_module: ClassVar[bool] = False
    """Whether :meth:`prepare` changes a module beyond use outside of the run."""
    engine_options: ClassVar[frozenset[str]] = frozenset()
    """The options that only :meth:`prepare` looks at, so that each engine may have its own."""

    def __init__(self, options: StrategyOptions) -> None:
        self.options = options

    @classmethod
    def availability(cls) -> Availability:
        """Return whether the framework is installed and usable, found without importing it."""
        return Availability(ok=True)

    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Say what this strategy can do with these options."""

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
        """Explain an error of the framework's own, and what to do; empty if it is not known.

        A session that ends with the error raises a :class:`ConfigError` of these words from it.
        """
        return ""

    def teardown(self) -> None:
        """Release what :meth:`setup` took, apart from the world."""
        return
