"""The plugins of Colossal-AI's Booster: what each can do, what it refuses, and its engine.

Nothing of Colossal-AI is imported before an engine is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from unipar.engine import checkpoint_activations, compile_modules
from unipar.errors import ConfigError
from unipar.strategy import Capabilities, EngineSpec, Precision
from unipar.world import Placement, World
from unipar_colossalai.options import ColossalAIOptions

if TYPE_CHECKING:
    from unipar_colossalai.engine import BoosterEngine

_SHARDED = ("optimizer", "gradients", "parameters")
_HALF: frozenset[Precision] = frozenset({"bf16", "fp16"})
_ALL: frozenset[Precision] = frozenset({"fp32", "bf16", "fp16"})
_DEVICES = frozenset({"cpu"})


class Plugin(ABC):
    """One plugin, with a run's options.

    Attributes:
        booster: the name of its class in ``colossalai.booster.plugin``.
        rewrites_module: whether it leaves the user's module without its weights.
        options: of the run.
    """

    booster: ClassVar[str]
    rewrites_module: ClassVar[bool] = False

    def __init__(self, options: ColossalAIOptions) -> None:
        self.options = options

    def capabilities(self) -> Capabilities:
        sharded = frozenset(_SHARDED[: self.options.stage])
        return Capabilities(_ALL, _DEVICES, sharded=sharded)

    def check(self, spec: EngineSpec, placement: Placement) -> None:  # noqa: B027
        """Refuse what it cannot do, before processes start."""

    def share(self, world: World) -> None:  # noqa: B027
        """Say which ranks get the same samples, if any do."""

    def change(self, module: nn.Module, spec: EngineSpec) -> list[Callable[[], None]]:
        """Change the module before the plugin sees it; what takes that back."""
        return [
            checkpoint_activations(module, spec.activation_checkpointing),
            compile_modules([module], spec.compile),
        ]

    def chosen(self, module: nn.Module, spec: EngineSpec, world: World) -> dict[str, Any]:
        """Arguments of its class that do not follow from the options alone."""
        return {}

    @abstractmethod
    def engine(self) -> type[BoosterEngine]:
        """The engine that trains with it."""


class DDP(Plugin):
    booster = "TorchDDPPlugin"

    def engine(self) -> type[BoosterEngine]:
        from unipar_colossalai.engine import DDPEngine

        return DDPEngine


class ZeRO(Plugin):
    booster = "LowLevelZeroPlugin"

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        from unipar_colossalai.checks import check_parameters

        if isinstance(spec.model, nn.Module):
            check_parameters(spec.model)

    def engine(self) -> type[BoosterEngine]:
        from unipar_colossalai.zero import ZeROEngine

        return ZeROEngine


class Gemini(ZeRO):
    """Its parameters are of a class of its own, and empty between uses."""

    booster = "GeminiPlugin"
    rewrites_module = True

    def capabilities(self) -> Capabilities:
        return Capabilities(
            _HALF,
            _DEVICES,
            sharded=frozenset(_SHARDED),
            several_engines=False,
            compile=False,
            half_weights=True,
        )

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        if spec.precision == "fp32":
            raise ConfigError(
                "colossalai: plugin='gemini' computes with half-precision weights beside fp32 "
                "ones, and not in precision='fp32'. Set precision='bf16', or use plugin='zero2'."
            )
        super().check(spec, placement)

    def chosen(self, module: nn.Module, spec: EngineSpec, world: World) -> dict[str, Any]:
        """Chunks of a size that the model fills: Gemini replicates one that does not fill any."""
        elements = sum(p.numel() for p in module.parameters() if p.requires_grad)
        return {
            "precision": spec.precision,
            "min_chunk_size_m": min(self.options.chunk_size_m, elements / 2**20),
            # Chunk sizes are multiples of it: the least that all ranks have an equal part of.
            "hidden_dim": world.size,
        }

    def engine(self) -> type[BoosterEngine]:
        from unipar_colossalai.gemini import GeminiEngine

        return GeminiEngine


class FSDP(ZeRO):
    booster = "TorchFSDPPlugin"
    rewrites_module = True

    def capabilities(self) -> Capabilities:
        return Capabilities(_ALL, _DEVICES, sharded=frozenset(_SHARDED), several_engines=False)

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        from unipar_colossalai.checks import check_no_scalar

        super().check(spec, placement)
        if isinstance(spec.model, nn.Module):
            check_no_scalar(spec.model)

    def chosen(self, module: nn.Module, spec: EngineSpec, world: World) -> dict[str, Any]:
        from unipar_colossalai.fsdp import STRATEGIES, policy, units

        return {
            "sharding_strategy": STRATEGIES[self.options.sharding],
            "auto_wrap_policy": policy(units(module, self.options.wrap)),
        }

    def engine(self) -> type[BoosterEngine]:
        from unipar_colossalai.fsdp import FSDPEngine

        return FSDPEngine


class Hybrid(Plugin):
    """Its modules hold parts of the user's."""

    booster = "HybridParallelPlugin"
    rewrites_module = True

    def capabilities(self) -> Capabilities:
        pipeline = self.options.pp_size > 1
        return Capabilities(
            _ALL,
            _DEVICES,
            sharded=frozenset(_SHARDED),
            custom_loop=not pipeline,
            several_engines=False,
            compile=False,
            pipeline=pipeline,
        )

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        from unipar_colossalai.hybrid_models import check_model, check_sizes

        check_sizes(self.options.tp_size, self.options.pp_size, placement)
        # A session asks before there is a model, with one that does nothing in its place.
        if isinstance(spec.model, nn.Module) and not isinstance(spec.model, nn.Identity):
            check_model(spec.model, self.options.tp_size, self.options.pp_size)

    def share(self, world: World) -> None:
        from unipar_colossalai.hybrid_models import share_replicas

        share_replicas(world, self.options.tp_size, self.options.pp_size)

    def change(self, module: nn.Module, spec: EngineSpec) -> list[Callable[[], None]]:
        # The engine does, later: Colossal-AI replaces the methods of the modules that it divides.
        return []

    def engine(self) -> type[BoosterEngine]:
        from unipar_colossalai.hybrid import HybridEngine
        from unipar_colossalai.hybrid_pipeline import PipelineEngine

        return HybridEngine if self.options.pp_size == 1 else PipelineEngine


PLUGINS: dict[str, type[Plugin]] = {
    "ddp": DDP,
    "zero1": ZeRO,
    "zero2": ZeRO,
    "gemini": Gemini,
    "fsdp": FSDP,
    "hybrid": Hybrid,
}
"""By the option's value."""
