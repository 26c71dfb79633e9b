"""Colossal-AI: a model under one of its Booster's plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from unipar.engine import checkpoint_activations, compile_modules
from unipar.errors import ConfigError
from unipar.strategy import Availability, Capabilities, EngineSpec, Strategy, seeded_model
from unipar.world import Placement, World, join
from unipar_colossalai import installed
from unipar_colossalai.options import DIVIDED, ColossalAIOptions

if TYPE_CHECKING:
    from unipar.install import Recipe
    from unipar_colossalai.engine import BoosterEngine
    from unipar_colossalai.framework import Framework

_SHARDED = ("optimizer", "gradients", "parameters")


class ColossalAIStrategy(Strategy):
    """Colossal-AI's Booster, with the plugin that the options name."""

    name = "colossalai"
    options_type = ColossalAIOptions
    options: ColossalAIOptions

    @classmethod
    def availability(cls) -> Availability:
        return installed.availability()

    @classmethod
    def recipe(cls) -> Recipe:
        return installed.recipe()

    def __init__(self, options: ColossalAIOptions) -> None:
        super().__init__(options)
        # Gemini's parameters are of a class of its own, and empty between uses; hybrid's are parts.
        self.rewrites_module = options.plugin in ("gemini", "fsdp", "hybrid")  # pyright: ignore

    def capabilities(self) -> Capabilities:
        gemini = self.options.plugin == "gemini"
        if self.options.plugin == "hybrid":
            return self._hybrid_capabilities()
        return Capabilities(
            frozenset({"bf16", "fp16"} if gemini else {"fp32", "bf16", "fp16"}),
            frozenset({"cpu"}),
            sharded=frozenset(_SHARDED[: self.options.stage]),
            several_engines=self.options.plugin not in ("gemini", "fsdp"),
            compile=not gemini,
            half_weights=gemini,
        )

    def _hybrid_capabilities(self) -> Capabilities:
        return Capabilities(
            frozenset({"fp32"}),
            frozenset({"cpu"}),
            sharded=frozenset(_SHARDED),
            custom_loop=self.options.pp_size == 1,
            several_engines=False,
            compile=False,
            pipeline=self.options.pp_size > 1,
        )

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        available = self.availability()
        if not available.ok:
            raise ConfigError(f"colossalai: {available.reason} To mend it: {available.remedy}")
        self.options.check_native()
        if self.options.plugin == "gemini" and spec.precision == "fp32":
            raise ConfigError(
                "colossalai: plugin='gemini' computes with half-precision weights beside fp32 "
                "ones, and not in precision='fp32'. Set precision='bf16', or use plugin='zero2'."
            )
        if self.options.plugin in DIVIDED and isinstance(spec.model, nn.Module):
            from unipar_colossalai.checks import check_no_scalar, check_parameters

            check_parameters(spec.model)
            if self.options.plugin == "fsdp":
                check_no_scalar(spec.model)
        if self.options.plugin == "hybrid":
            from unipar_colossalai.hybrid_models import check_model, check_sizes

            check_sizes(self.options.tp_size, self.options.pp_size, placement)
            # A session asks before there is a model, with one that does nothing in its place.
            if isinstance(spec.model, nn.Module) and not isinstance(spec.model, nn.Identity):
                check_model(spec.model, self.options.tp_size, self.options.pp_size)

    def data_size(self, placement: Placement) -> int:
        return placement.size // (self.options.tp_size * self.options.pp_size)

    def setup(self, placement: Placement) -> World:
        from unipar_colossalai.framework import Framework, load

        load()  # Should it fail, there is no process group yet to leave.
        world = join(placement)
        self._framework: Framework = Framework(world, self.options.plugin)
        if self.options.plugin == "hybrid":
            from unipar_colossalai.hybrid_models import share_replicas

            share_replicas(world, self.options.tp_size, self.options.pp_size)
        return world

    def prepare(self, spec: EngineSpec, world: World) -> BoosterEngine:
        from unipar_colossalai.engine import DDPEngine
        from unipar_colossalai.gemini import GeminiEngine
        from unipar_colossalai.zero import ZeROEngine

        module = seeded_model(spec).to(world.device)
        if self.options.plugin == "hybrid":
            return self._prepare_hybrid(spec, world, module)
        undo = [checkpoint_activations(module, spec.activation_checkpointing)]
        undo.append(compile_modules([module], spec.compile))
        if self.options.plugin == "ddp":
            return DDPEngine(spec, world, module, self._booster("TorchDDPPlugin"), undo)
        promised = self.options.elementwise_optimizer
        if self.options.plugin == "fsdp":
            return self._prepare_fsdp(spec, world, module, undo)
        if self.options.plugin == "gemini":
            booster = self._booster("GeminiPlugin", **self._chunks(module, spec, world))
            return GeminiEngine(spec, world, module, booster, undo, promised)
        booster = self._booster("LowLevelZeroPlugin")
        return ZeROEngine(spec, world, module, booster, undo, promised)

    def _prepare_hybrid(self, spec: EngineSpec, world: World, module: nn.Module) -> BoosterEngine:
        from unipar_colossalai.hybrid import HybridEngine
        from unipar_colossalai.hybrid_pipeline import PipelineEngine

        kind = HybridEngine if self.options.pp_size == 1 else PipelineEngine
        booster = self._booster("HybridParallelPlugin")
        return kind(spec, world, module, booster, [], self.options.elementwise_optimizer)

    def _prepare_fsdp(
        self, spec: EngineSpec, world: World, module: nn.Module, undo: list[Any]
    ) -> BoosterEngine:
        from unipar_colossalai.fsdp import STRATEGIES, FSDPEngine, policy, units

        booster = self._booster(
            "TorchFSDPPlugin",
            sharding_strategy=STRATEGIES[self.options.sharding],
            auto_wrap_policy=policy(units(module, self.options.wrap)),
        )
        return FSDPEngine(spec, world, module, booster, undo, self.options.elementwise_optimizer)

    def _chunks(self, module: nn.Module, spec: EngineSpec, world: World) -> dict[str, Any]:
        """Chunks of a size that the model fills: Gemini replicates one that does not fill any."""
        elements = sum(p.numel() for p in module.parameters() if p.requires_grad)
        return {
            "precision": spec.precision,
            "min_chunk_size_m": min(self.options.chunk_size_m, elements / 2**20),
            # Chunk sizes are multiples of it: the least that all ranks have an equal part of.
            "hidden_dim": world.size,
        }

    def _booster(self, plugin: str, **chosen: Any) -> Any:
        from unipar_colossalai.framework import quiet

        booster = self._framework.booster
        with quiet():
            made = getattr(booster.plugin, plugin)(**self.options.arguments(), **chosen)
            return booster.Booster(plugin=made)

    def teardown(self) -> None:
        self._framework.stop()
