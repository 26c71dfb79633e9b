"""What the engines of all plugins are made from, and that of the DDP plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from unipar.engine import (
    DDPReducer,
    OptimizerStepper,
    PrecisionPolicy,
    StepEngine,
    broadcast_tensors,
    build_optimizer,
)
from unipar.strategy import EngineSpec
from unipar.world import World
from unipar_colossalai.boosted import Boosted
from unipar_colossalai.framework import quiet


@dataclass(frozen=True)
class Start:
    """Everything that an engine is made from.

    Attributes:
        spec: what the run asks for.
        world: the joined processes.
        module: the user's, on the device.
        booster: Colossal-AI's Booster, with the plugin.
        undo: what takes back the changes to the module.
    """

    spec: EngineSpec
    world: World
    module: nn.Module
    booster: Any
    undo: list[Callable[[], None]]

    def send_weights(self) -> None:
        """Give every rank the weights and buffers of rank 0.

        Colossal-AI takes each rank's part from that rank's own weights.
        """
        broadcast_tensors([*self.module.parameters(), *self.module.buffers()], self.world)

    def boost(self, optimizer: Optimizer | None) -> tuple[Any, Any]:
        """Let Colossal-AI wrap the module and an optimizer; ``None`` stays ``None``."""
        with quiet():
            wrapper, boosted, *_ = self.booster.boost(self.module, optimizer)
        return wrapper, boosted


class BoosterEngine(StepEngine):
    """A module under Colossal-AI's Booster.

    Args:
        start: what it is made from.
        wrapper: what Colossal-AI has made of the module.
        optimizer: the user's.
        framework_optimizer: what Colossal-AI has made of it.
        parts: those that :class:`StepEngine` takes.

    Attributes:
        booster: Colossal-AI's Booster.
        wrapper: what it made of the module.
        framework_optimizer: what it made of the optimizer.
    """

    def __init__(
        self,
        start: Start,
        wrapper: Any,
        optimizer: Optimizer | None,
        framework_optimizer: Any,
        **parts: Any,
    ) -> None:
        self.booster, self.wrapper = start.booster, wrapper
        self.framework_optimizer = framework_optimizer
        super().__init__(start.spec, start.world, start.module, optimizer, **parts)


def prepare(start: Start) -> BoosterEngine:
    """Keep replicas, under the DDP plugin."""
    module = start.module
    optimizer = build_optimizer(start.spec, module)
    wrapper, stepped = start.boost(optimizer)
    precision = PrecisionPolicy(start.spec.precision, start.world.device)
    stepper = None
    if optimizer is not None:
        stepper = OptimizerStepper(stepped, precision, module.parameters())
    reducer = DDPReducer(
        wrapper.module,
        start.world,
        allow_unused="colossalai:plugin=ddp,find_unused_parameters=true",
        run_backward=partial(start.booster.backward, optimizer=stepped),
    )
    return BoosterEngine(
        start,
        wrapper,
        optimizer,
        stepped,
        model=Boosted(module, wrapper),
        loop_model=module,
        reducer=reducer,
        precision=precision,
        stepper=stepper,
        undo=start.undo,
    )
