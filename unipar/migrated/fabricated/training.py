"""Models and seeds, by the rules of Lightning Fabric, of functions that have no run at hand."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from unipar.compat.fp32_outputs import Widened
from unipar.migrated import script


def engine(model: nn.Module) -> Callable[..., Any]:
    """Return a model that computes in the run's precision, and gives fp32."""
    computes = script.engine(model)
    return computes if script.settings().precision == "fp32" else Widened(computes)


def seed_everything(seed: int | None = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed the generators of Python, NumPy and torch, and the order of shuffled loaders.

    Args:
        seed: left out: what ``PL_GLOBAL_SEED`` says, or 0.
        workers: taken for compatibility; workers are seeded as torch does it.
        verbose: likewise.
    """
    seed = int(os.environ.get("PL_GLOBAL_SEED", 0) if seed is None else seed)
    os.environ["PL_GLOBAL_SEED"] = str(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    torch.manual_seed(seed)
    return seed
