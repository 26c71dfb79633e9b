"""The training step of the DDP plugin, and what the engines of all plugins share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unipar.engine import DDPModuleEngine, DDPReducer, ModuleEngine
from unipar.strategy import EngineSpec
from unipar.world import World
from unipar_colossalai.boosted import Boosted
from unipar_colossalai.framework import quiet


@dataclass(frozen=True)
class Start:
    """What an engine is made from.

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
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)


class BoosterEngine(ModuleEngine):
    """A module under Colossal-AI's Booster; gradients are reduced by its plugin.

    Attributes:
        booster: Colossal-AI's Booster.
        wrapper: what it made of the module.
        framework_optimizer: what it made of the optimizer.
    """

    def __init__(self, start: Start) -> None:
        self.booster = start.booster
        self.framework_optimizer: Any = None
        super().__init__(start.spec, start.world, start.module, undo=start.undo)
        if self.optimizer is None:
            self._boost(None)
        self._model = Boosted(start.module, self.wrapper)

    def _build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super()._build_optimizer()
        self._boost(optimizer)
        return optimizer

    def _boost(self, optimizer: torch.optim.Optimizer | None) -> None:
        with quiet():
            self.wrapper, self.framework_optimizer, *_ = self.booster.boost(self.module, optimizer)

    def _require_optimizer(self) -> Any:
        super()._require_optimizer()
        # It is what steps; hyperparameters and state are those of the optimizer that it holds.
        return self.framework_optimizer

    def _backward(self, loss: torch.Tensor) -> None:
        if self._scaler is not None:
            loss = self._scaler.scale(loss)
        self.booster.backward(loss, self.framework_optimizer)


class DDPEngine(DDPModuleEngine, BoosterEngine):
    """Gradients are summed during the backward pass of the last micro-batch."""

    def __init__(self, start: Start) -> None:
        super().__init__(start)
        self._reducer = DDPReducer(
            self.wrapper.module, allow_unused="colossalai:plugin=ddp,find_unused_parameters=true"
        )
