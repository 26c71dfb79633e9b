"""``zero1`` and ``zero2``: the optimizer divided among ranks, or the gradients too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from unipar.strategy import EngineSpec
from unipar.world import World
from unipar_colossalai.plugins.base import PRECISION, Dividing

if TYPE_CHECKING:
    from unipar_colossalai.engine import BoosterEngine, Start


class ZeRO1(Dividing):
    booster = "LowLevelZeroPlugin"
    stage = 1
    tunes = ("reduce_bucket_size_m",)
    owned: ClassVar[Mapping[str, str]] = {
        "stage": "the option 'plugin'",
        "reduce_bucket_size_in_m": "the option 'reduce_bucket_size_m'",
        "cast_inputs": "the run's precision",
        **PRECISION,
    }
    free = ("verbose",)

    def arguments(self, module: nn.Module, spec: EngineSpec, world: World) -> dict[str, Any]:
        return {
            "stage": self.stage,
            # Half precision is autocast's: weights, gradients and reductions stay fp32.
            "precision": "fp32",
            "cast_inputs": False,
            "reduce_bucket_size_in_m": self.options.reduce_bucket_size_m,
            # It uses streams that only CUDA has, and its result is not proved.
            "overlap_communication": False,
        }

    def prepare(self, start: Start) -> BoosterEngine:
        from unipar_colossalai.zero import prepare

        return prepare(start)


class ZeRO2(ZeRO1):
    stage = 2
