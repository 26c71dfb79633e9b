"""Steps, by the rules of Accelerate, of functions that have no run at hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from unipar.migrated import script
from unipar.migrated.accelerated.run import current
from unipar.migrated.fp32_outputs import Widened


def backward(loss: torch.Tensor, of: Any = None) -> None:
    """Add the gradients of a micro-batch: those of its loss, divided by the number of them."""
    script.backward(loss / current().gradient_accumulation_steps, of)


def step(optimizer: Optimizer) -> None:
    """Step, if this micro-batch is the last of its step."""
    run = current()
    if run.sync_gradients:
        run.optimizer_step_was_skipped = script.engine(optimizer).step().skipped


def engine(model: nn.Module) -> Callable[..., Any]:
    """Return a model that computes as the strategy does, and gives fp32 in any precision."""
    computes = script.engine(model)
    return computes if script.settings().precision == "fp32" else Widened(computes)


def set_seed(seed: int, device_specific: bool = False) -> None:
    """Seed the generators of Python, NumPy and torch; of each rank otherwise, if so asked."""
    seed += script.world().rank if device_specific else 0
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
