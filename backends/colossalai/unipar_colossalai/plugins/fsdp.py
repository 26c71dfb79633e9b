"""``fsdp``: PyTorch's, by which weights are gathered unit by unit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from unipar.engine import Division, Flat
from unipar.strategy import Capabilities, EngineSpec
from unipar.world import Placement, World
from unipar_colossalai.checks import check_no_scalar
from unipar_colossalai.plugins.base import ALL, DEVICES, SHARDED, Dividing

if TYPE_CHECKING:
    from unipar_colossalai.engine import BoosterEngine, Start


class FSDP(Dividing):
    booster = "TorchFSDPPlugin"
    stage = 3
    rewrites_module = True
    tunes = ("sharding", "wrap")
    owned: ClassVar[Mapping[str, str]] = {
        "sharding_strategy": "the option 'sharding'",
        "auto_wrap_policy": "the option 'wrap'",
        "mixed_precision": "the run's precision",
        "sync_module_states": "rank 0's weights, which all ranks begin with",
        "process_group": "the run's processes",
    }

    def capabilities(self) -> Capabilities:
        return Capabilities(
            ALL,
            DEVICES,
            sharded=frozenset(SHARDED),
            several_engines=False,
            splits_tensors=True,
            sparse_gradients=False,
        )

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        super().check(spec, placement)
        if isinstance(spec.model, nn.Module):
            check_no_scalar(spec.model)

    def divisions(self, world: World) -> tuple[Division, ...]:
        # The user's parameters themselves become parts, in the optimizer too.
        return (Flat(min(world.size, 2), comes_first=True),)

    def arguments(self, module: nn.Module, spec: EngineSpec, world: World) -> dict[str, Any]:
        from unipar_colossalai.fsdp import STRATEGIES, policy, units

        return {
            "sharding_strategy": STRATEGIES[self.options.sharding],
            "auto_wrap_policy": policy(units(module, self.options.wrap)),
        }

    def prepare(self, start: Start) -> BoosterEngine:
        from unipar_colossalai.fsdp import prepare

        return prepare(start)
