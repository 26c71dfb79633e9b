"""An engine of a plugin that divides weights, with a small model, for one test function."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim

from unipar.data.batch import Batch, MicroBatch
from unipar.errors import ConfigError
from unipar.strategy import EngineSpec, registry
from unipar.testing.harness import Exported
from unipar.testing.models import Network
from unipar.world import Placement

FSDP, GEMINI = "colossalai:plugin=fsdp", "colossalai:plugin=gemini"


def precision_of(strategy: str) -> Any:
    """What its tests train in; Gemini has no fp32."""
    return "bf16" if strategy.startswith(GEMINI) else "fp32"


def adamw(named: Any) -> optim.Optimizer:
    return optim.AdamW([p for _, p in named], lr=1e-2)


def square(model: Any, x: Any) -> torch.Tensor:
    return model(x).square().mean()


def network(seed: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Network(4, 2)


def train(engine: Any, world: Any, loss: Any = square, steps: int = 2) -> Exported:
    """Two samples a rank in each step, other ones on each."""
    for step in range(steps):
        mine = torch.linspace(-1, 1, 8).reshape(2, 4) * (step + 1 + world.rank)
        engine.train_step(Batch((MicroBatch(mine, 2),), 2 * world.size), loss)
    return Exported.of(engine)


def with_engine(
    placement: Placement, strategy: str, fn: Any, model: nn.Module, **asked: Any
) -> Any:
    """``fn(engine, world)``, or what was refused."""
    used = registry.resolve(strategy)
    world = used.setup(placement)
    try:
        given = {"optimizer": adamw, "precision": precision_of(strategy), **asked}
        engine = used.prepare(EngineSpec(model, **given), world)
        try:
            return fn(engine, world)
        finally:
            engine.close()
    except ConfigError as error:
        return str(error)
    finally:
        used.teardown()
        world.leave()
