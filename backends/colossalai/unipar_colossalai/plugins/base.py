"""What there is to say about a plugin, and what most of them have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from unipar.engine import Division, Flat, checkpoint_activations, compile_modules
from unipar.errors import ConfigError, did_you_mean
from unipar.layout import Layout
from unipar.strategy import Capabilities, EngineSpec, Precision
from unipar.world import Placement, World
from unipar_colossalai.checks import check_parameters

if TYPE_CHECKING:
    from unipar_colossalai.engine import BoosterEngine, Start
    from unipar_colossalai.options import ColossalAIOptions

SHARDED = ("optimizer", "gradients", "parameters")
ALL: frozenset[Precision] = frozenset({"fp32", "bf16", "fp16"})
DEVICES = frozenset({"cpu"})

_SCALER = (
    *("initial_scale", "min_scale", "max_scale", "hysteresis"),
    *("growth_factor", "backoff_factor", "growth_interval"),
)

PRECISION = {
    "precision": "the run's precision",
    "master_weights": "the run's precision",
    "max_norm": "the run's max_grad_norm",
    "norm_type": "the run's max_grad_norm",
    **dict.fromkeys(_SCALER, "the run's fp16 loss scaler"),
}
"""What is in ``owned`` of each plugin that would scale and clip by itself."""


class Plugin(ABC):
    """One plugin, with a run's options.

    Attributes:
        booster: the name of its class in ``colossalai.booster.plugin``.
        stage: the ZeRO stage; 0 for replicas.
        tunes: the options that have a meaning for it, and not for every plugin.
        owned: the arguments of its class that unipar fills in, and from what.
        free: the arguments that a user may set natively: they change no number.
        rewrites_module: whether it leaves the user's module without its weights.
        options: of the run.
    """

    booster: ClassVar[str]
    stage: ClassVar[int] = 0
    tunes: ClassVar[tuple[str, ...]]
    owned: ClassVar[Mapping[str, str]]
    free: ClassVar[tuple[str, ...]] = ()
    rewrites_module: ClassVar[bool] = False

    def __init__(self, options: ColossalAIOptions) -> None:
        self.options = options

    @classmethod  # noqa: B027
    def check_options(cls, options: ColossalAIOptions) -> None:
        """Refuse values of its options that contradict each other.

        Raises:
            ValueError: some do.
        """

    def capabilities(self) -> Capabilities:
        return Capabilities(
            ALL,
            DEVICES,
            sharded=frozenset(SHARDED[: self.stage]),
            splits_tensors=self.stage > 0,
            sparse_gradients=self.stage == 0,
            sample_dropout=True,
        )

    def check_native(self) -> None:
        """Refuse native arguments that unipar fills in itself, or that no test has proved.

        Raises:
            ConfigError: there is one.
        """
        for name in self.options.native:
            if name in self.owned:
                raise ConfigError(
                    f"colossalai: native sets '{name}', which follows from "
                    f"{self.owned[name]}. Set that one, and leave it out of native."
                )
            if name not in self.free:
                allowed = ", ".join(self.free) or "none"
                raise ConfigError(
                    f"colossalai: native sets '{name}', which plugin='{self.options.plugin}' does "
                    f"not take here.{did_you_mean(name, self.free)} It takes: {allowed}."
                )

    def check(self, spec: EngineSpec, placement: Placement) -> None:  # noqa: B027
        """Refuse what it cannot do, before processes start."""

    def layout(self, placement: Placement) -> Layout:
        """How the processes are arranged."""
        replicas = Layout(dp_replicate=placement.size)
        return Layout(dp_shard=placement.size) if self.stage else replicas

    def change(self, module: nn.Module, spec: EngineSpec) -> list[Callable[[], None]]:
        """Change the module before the plugin sees it; what takes that back."""
        return [
            checkpoint_activations(module, spec.activation_checkpointing),
            compile_modules([module], spec.compile),
        ]

    def divisions(self, world: World) -> tuple[Division, ...]:
        """The ways in which it divides what the optimizer updates."""
        return ()

    def arguments(self, module: nn.Module, spec: EngineSpec, world: World) -> dict[str, Any]:
        """Return the arguments that its class is called with, but for native ones."""
        return {}

    @abstractmethod
    def prepare(self, start: Start) -> BoosterEngine:
        """Boost the model, and put an engine together that trains with it. Collective."""


class Dividing(Plugin):
    """One that divides what it trains into flat parts, whatever the model."""

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        if isinstance(spec.model, nn.Module):
            check_parameters(spec.model)

    def divisions(self, world: World) -> tuple[Division, ...]:
        return (Flat(min(world.size, 2)),)
