"""Functions for scripts migrated from Accelerate, beside :mod:`unipar.migrated.script`.

Accelerate counts micro-batches, deals out the data, steps schedulers and gathers metrics by rules
of its own, which training depends on. A :class:`Run` keeps them under every strategy, and names
its methods as Accelerate does; Accelerate itself is not imported.
"""

from __future__ import annotations

from unipar.migrated.accelerated.dispatching import skip_first_batches
from unipar.migrated.accelerated.logs import get_logger
from unipar.migrated.accelerated.run import Run, current
from unipar.migrated.accelerated.training import backward, engine, set_seed, step

__all__ = [
    "Run", "backward", "current", "engine", "get_logger", "set_seed", "skip_first_batches", "step",
]  # fmt: skip
