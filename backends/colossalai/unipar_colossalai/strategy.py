"""Colossal-AI: a model under one of its Booster's plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from unipar.engine import checkpoint_activations, compile_modules
from unipar.errors import ConfigError
from unipar.strategy import Availability, Capabilities, EngineSpec, Strategy, seeded_model
from unipar.world import Placement, World, join
from unipar_colossalai import installed
from unipar_colossalai.options import ZERO, ColossalAIOptions

if TYPE_CHECKING:
    from unipar.install import Recipe
    from unipar_colossalai.engine import BoosterEngine
    from unipar_colossalai.framework import Framework

_SHARDED = ("optimizer", "gradients")


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

    def capabilities(self) -> Capabilities:
        return Capabilities(
            frozenset({"fp32", "bf16", "fp16"}),
            frozenset({"cpu"}),
            sharded=frozenset(_SHARDED[: self.options.stage]),
        )

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        available = self.availability()
        if not available.ok:
            raise ConfigError(f"colossalai: {available.reason} To mend it: {available.remedy}")
        self.options.check_native()
        if self.options.plugin in ZERO and isinstance(spec.model, nn.Module):
            from unipar_colossalai.checks import check_parameters

            check_parameters(spec.model)

    def setup(self, placement: Placement) -> World:
        from unipar_colossalai.framework import Framework, load

        load()  # Should it fail, there is no process group yet to leave.
        world = join(placement)
        self._framework: Framework = Framework(world, self.options.plugin)
        return world

    def prepare(self, spec: EngineSpec, world: World) -> BoosterEngine:
        from unipar_colossalai.engine import DDPEngine
        from unipar_colossalai.zero import ZeROEngine

        module = seeded_model(spec).to(world.device)
        undo = [checkpoint_activations(module, spec.activation_checkpointing)]
        undo.append(compile_modules([module], spec.compile))
        if self.options.plugin == "ddp":
            return DDPEngine(spec, world, module, self._booster("TorchDDPPlugin"), undo)
        promised = self.options.elementwise_optimizer
        booster = self._booster("LowLevelZeroPlugin")
        return ZeROEngine(spec, world, module, booster, undo, promised)

    def _booster(self, plugin: str) -> Any:
        from unipar_colossalai.framework import quiet

        booster = self._framework.booster
        with quiet():
            made = getattr(booster.plugin, plugin)(**self.options.arguments())
            return booster.Booster(plugin=made)

    def teardown(self) -> None:
        self._framework.stop()
