"""Seeds by the rules of Fabric, so that a script draws the same numbers."""

from __future__ import annotations

import logging
import os
import random
from typing import Any

import numpy as np
import torch

from unipar.compat.fabric import ranks
from unipar.errors import ConfigError

log = logging.getLogger("unipar")
_MOST, _BITS = 2**32 - 1, 2**64 - 1


def seed_everything(seed: Any = None, workers: bool = False, verbose: bool = True) -> int:
    """Seed the generators of Python, NumPy and torch, and the order of shuffled loaders.

    Args:
        seed: left out: what ``PL_GLOBAL_SEED`` says, or 0.
        workers: whether workers of loaders that are set up have seeds of their own on each rank.
        verbose: whether to log the seed.

    Raises:
        ConfigError: NumPy does not take the seed.
    """
    seed = int(os.environ.get("PL_GLOBAL_SEED", 0) if seed is None else seed)
    if not 0 <= seed <= _MOST:
        raise ConfigError(f"seed_everything({seed}): NumPy takes seeds from 0 to {_MOST}.")
    if verbose:
        log.info("[rank: %d] Seed set to %d", ranks.rank(), seed)
    os.environ["PL_GLOBAL_SEED"] = str(seed)
    os.environ["PL_SEED_WORKERS"] = str(int(workers))
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed


def reset_seed() -> None:
    """Seed as the last :func:`seed_everything` did; nothing without one."""
    if "PL_GLOBAL_SEED" in os.environ:
        seed_everything(workers=bool(int(os.environ.get("PL_SEED_WORKERS", 0))), verbose=False)


# As in lightning_fabric 2.6.6, utilities/seed.py: workers are to draw what they draw there.
def pl_worker_init_function(worker_id: int, rank: int | None = None) -> None:
    """Seed a worker of a loader by torch's seed, its number and the rank."""
    own = ranks.rank() if rank is None else rank
    base = torch.initial_seed() - worker_id
    mixed = (base << 32) | (worker_id << 16) | own
    mixed ^= mixed >> 33
    mixed = mixed * 0xFF51AFD7ED558CCD & _BITS
    mixed ^= mixed >> 33
    mixed = mixed * 0xC4CEB9FE1A85EC53 & _BITS
    mixed ^= mixed >> 33
    seeds = []
    for _ in range(3):
        mixed = (mixed * 6364136223846793005 + 1) & _BITS
        seeds.append(mixed)
    torch.manual_seed(seeds[0])
    random.seed((seeds[1] << 32) | seeds[2])
    np.random.seed(np.random.SeedSequence([base, worker_id, own]).generate_state(4))
