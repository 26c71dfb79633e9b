"""DataParallel: one process that splits each batch over its GPUs."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from unipar.engine import SeenAsModule, StepEngine, build_optimizer, checkpoint_activations
from unipar.errors import ConfigError
from unipar.strategy import Capabilities, EngineSpec, Strategy, StrategyOptions, seeded_model
from unipar.world import Placement, World, join
from unipar_torch.single import PRECISIONS


class DPOptions(StrategyOptions):
    """Which GPUs are used is up to ``CUDA_VISIBLE_DEVICES``."""

    strategy: ClassVar[str] = "dp"


class DPStrategy(Strategy):
    """``torch.nn.DataParallel``; ``ddp`` is faster, and this is here to compare with."""

    name = "dp"
    options_type = DPOptions

    def capabilities(self) -> Capabilities:
        # Its copies of a module would run the methods of the first.
        precisions = PRECISIONS - {"fp8"}
        return Capabilities(
            precisions, frozenset({"cuda"}), max_devices=1, custom_loop=False, compile=False
        )

    def check(self, spec: EngineSpec, placement: Placement) -> None:
        if placement.device_type != "cuda":
            raise ConfigError(
                "strategy 'dp' (torch.nn.DataParallel) splits a batch over the GPUs of one "
                "process, and there is no GPU here. Use strategy='ddp', which runs on CPUs too."
            )
        if placement.size > 1:
            raise ConfigError(
                f"strategy 'dp' is one process that drives all GPUs, and {placement.size} "
                "processes were asked for. Use devices=1, or strategy='ddp'."
            )

    def setup(self, placement: Placement) -> World:
        return join(placement, process_group=False)

    def prepare(self, spec: EngineSpec, world: World) -> StepEngine:
        module = seeded_model(spec).to(world.device)
        undo = [checkpoint_activations(module, spec.activation_checkpointing)]
        copies = nn.DataParallel(module, device_ids=list(range(torch.cuda.device_count())))
        model = SeenAsModule(module, copies)
        optimizer = build_optimizer(spec, module, may_fuse=True)
        return StepEngine(spec, world, module, optimizer, model=model, undo=undo)
