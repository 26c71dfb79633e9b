"""``ddp``: replicas, whose gradients are summed while they are computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from unipar.strategy import EngineSpec
from unipar.world import World
from unipar_colossalai.plugins.base import Plugin

if TYPE_CHECKING:
    from unipar_colossalai.engine import BoosterEngine, Start


class DDP(Plugin):
    booster = "TorchDDPPlugin"
    tunes = (
        "bucket_cap_mb",
        "find_unused_parameters",
        "static_graph",
        "gradient_as_bucket_view",
        "broadcast_buffers",
    )
    owned: ClassVar[Mapping[str, str]] = {name: f"the option '{name}'" for name in tunes}
    free = ("check_reduction",)

    def arguments(self, module: nn.Module, spec: EngineSpec, world: World) -> dict[str, Any]:
        return {name: getattr(self.options, name) for name in self.tunes}

    def prepare(self, start: Start) -> BoosterEngine:
        from unipar_colossalai.engine import prepare

        return prepare(start)
