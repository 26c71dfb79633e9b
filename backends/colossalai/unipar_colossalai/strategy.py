"""Colossal-AI: a model under one of its Booster's plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from unipar.engine import refuse_shared_memory, with_divisible_optimizer
from unipar.errors import ConfigError
from unipar.layout import Layout
from unipar.strategy import Availability, Capabilities, EngineSpec, Strategy, seeded_model
from unipar.world import Placement, World, join
from unipar_colossalai import installed
from unipar_colossalai.options import ColossalAIOptions
from unipar_colossalai.plugins import PLUGINS

if TYPE_CHECKING:
    from unipar.install import Recipe
    from unipar_colossalai.engine import BoosterEngine
    from unipar_colossalai.framework import Framework


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
        self._plugin = PLUGINS[options.plugin](options)
        self.rewrites_module = self._plugin.rewrites_module  # pyright: ignore

    def capabilities(self) -> Capabilities:
        return self._plugin.capabilities()

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        available = self.availability()
        if not available.ok:
            raise ConfigError(f"colossalai: {available.reason} To fix it: {available.remedy}")
        self._plugin.check_native()
        self._plugin.check(spec, placement)

    def layout(self, placement: Placement) -> Layout:
        return self._plugin.layout(placement)

    def setup(self, placement: Placement) -> World:
        from unipar_colossalai.framework import Framework, load

        load()  # Should it fail, there is no process group yet to leave.
        world = join(placement, self.layout(placement))
        self._framework: Framework = Framework(world, self.options.plugin)
        return world

    def prepare(self, spec: EngineSpec, world: World) -> BoosterEngine:
        from unipar_colossalai.engine import Start

        module = seeded_model(spec).to(world.device)
        if self.capabilities().sharded:
            refuse_shared_memory(module, self.name)
        undo = self._plugin.change(module, spec)
        booster = self._booster(self._plugin.arguments(module, spec, world))
        spec = with_divisible_optimizer(spec, self.name, world, *self._plugin.divisions(world))
        return self._plugin.prepare(Start(spec, world, module, booster, undo))

    def _booster(self, arguments: dict[str, Any]) -> Any:
        from unipar_colossalai.framework import quiet

        booster = self._framework.booster
        with quiet():
            kind = getattr(booster.plugin, self._plugin.booster)
            return booster.Booster(plugin=kind(**arguments, **self.options.native))

    def teardown(self) -> None:
        self._framework.stop()
