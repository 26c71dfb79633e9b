"""Colossal-AI's face: imports of ``unipar.compat.colossalai``, and nothing else changes.

The script runs under every strategy with a loop of one's own. Order of data, what a backward pass
adds, when gradients are clipped and the pace of schedulers are Colossal-AI's: so, as there, results
depend on the number of ranks. Any name that is not here says when it is imported what to do.
"""

from __future__ import annotations

from unipar.compat.colossalai import (
    accelerator,
    booster,
    cluster,
    initialize,
    interface,
    lazy,
    logging,
    nn,
    utils,
)
from unipar.compat.colossalai.initialize import (
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)
from unipar.compat.colossalai_names import TOP

__version__ = "0.5.0"
"""Colossal-AI's, whose names and rules these are."""

__all__ = [
    "accelerator", "booster", "cluster", "initialize", "interface", "launch",
    "launch_from_openmpi", "launch_from_slurm", "launch_from_torch", "lazy", "logging", "nn",
    "utils",
]  # fmt: skip

__getattr__ = TOP.refusing(__name__)
