"""A model under each face that prepares one, in a run of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar.compat import deepspeed
from unipar.compat.accelerate import Accelerator
from unipar.compat.fabric import Fabric
from unipar.compat.run import current
from unipar.world import Placement

CONFIG = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0,
          "zero_optimization": {"stage": 2}}  # fmt: skip
Step = Callable[[torch.Tensor], None]
"""Takes a step by a loss."""


def under(placement: Placement, strategy: str | None, act: Callable[..., Any], *args: Any) -> Any:
    """Act in a run of which unipar.yaml says the strategy, or none."""
    monkeypatch = pytest.MonkeyPatch()
    if strategy is None:
        monkeypatch.delenv("UNIPAR_STRATEGY", raising=False)
    else:
        monkeypatch.setenv("UNIPAR_STRATEGY", strategy)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    current.stand(placement, Path("unipar.yaml"))
    try:
        return act(*args)
    finally:
        current.close()
        monkeypatch.undo()


def by_accelerate(model: nn.Module, strategy: Any = None) -> tuple[Any, Step]:
    """The prepared model, which SGD trains, and what steps by a loss of it."""
    accelerator = Accelerator(strategy=strategy)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return prepared, _step_by(accelerator.backward, optimizer)


def by_fabric(model: nn.Module, strategy: Any = "auto") -> tuple[Any, Step]:
    """Likewise."""
    fabric = Fabric(strategy=strategy)
    prepared, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    return prepared, _step_by(fabric.backward, optimizer)


def _step_by(backward: Step, optimizer: Any) -> Step:
    def step(loss: torch.Tensor) -> None:
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_deepspeed(model: nn.Module, strategy: Any = None) -> tuple[Any, Step]:
    """Likewise, under the strategy that unipar.yaml says."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)

    def step(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return engine, step
