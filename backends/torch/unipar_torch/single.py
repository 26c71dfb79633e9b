"""The plain loop on one device: the reference that every other strategy is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from unipar.engine import (
    StepEngine,
    build_optimizer,
    checkpoint_activations,
    compile_modules,
    compute_in_float8,
    offload_activations,
)
from unipar.errors import ConfigError
from unipar.strategy import (
    Capabilities,
    EngineSpec,
    Precision,
    Strategy,
    StrategyOptions,
    seeded_model,
)
from unipar.world import Placement, World, join

if TYPE_CHECKING:
    from unipar.sizing import Needs

PRECISIONS: frozenset[Precision] = frozenset({"fp32", "bf16", "fp16", "fp8"})
DEVICE_TYPES = frozenset({"cpu", "cuda"})


class SingleOptions(StrategyOptions):
    """The plain loop has nothing to tune."""

    strategy: ClassVar[str] = "single"


class SingleStrategy(Strategy):
    """One process, one device, no process group."""

    name = "single"
    options_type = SingleOptions

    @classmethod
    def bid(cls, needs: Needs) -> float:
        return 2.0 if needs.devices == 1 else 0.0

    def capabilities(self) -> Capabilities:
        return Capabilities(
            PRECISIONS,
            DEVICE_TYPES,
            max_devices=1,
            offload=frozenset({"activations"}),
            selective_checkpointing=True,
            sample_dropout=True,
        )

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        if placement.size > 1:
            raise ConfigError(
                f"strategy 'single' runs on one device, and {placement.size} were asked for. "
                "Use strategy='ddp' (or 'auto'), or devices=1."
            )

    def setup(self, placement: Placement) -> World:
        return join(placement, self.layout(placement), process_group=False)

    def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
        module = seeded_model(spec).to(world.device)
        undo = [
            compute_in_float8(module, spec.precision),
            checkpoint_activations(module, spec.activation_checkpointing),
            offload_activations(module, spec.activation_offload, world.device),
            compile_modules([module], spec.compile),
        ]
        return StepEngine(
            spec, world, module, build_optimizer(spec, module, may_fuse=True), undo=undo
        )
