"""Fabric's face: an import of ``unipar.compat.fabric``, and nothing else changes.

The script runs under every strategy with a loop of one's own. Order of data, padding and weighting
of losses are Fabric's: so, as there, results depend on the number of ranks. Any name that is not
here says when it is imported what to do instead.
"""

from __future__ import annotations

from unipar.compat.fabric import (
    accelerators,
    fabric,
    loggers,
    plugins,
    strategies,
    utilities,
    wrappers,
)
from unipar.compat.fabric.fabric import Fabric
from unipar.compat.fabric.utilities import disable_possible_user_warnings, seed_everything
from unipar.compat.fabric.wrappers import is_wrapped
from unipar.compat.fabric_names import TOP

__version__ = "2.6.6"
"""Fabric's, whose names and rules these are."""

__all__ = [
    "Fabric", "accelerators", "disable_possible_user_warnings", "fabric", "is_wrapped", "loggers",
    "plugins", "seed_everything", "strategies", "utilities", "wrappers",
]  # fmt: skip

__getattr__ = TOP.refusing(__name__)
