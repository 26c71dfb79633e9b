"""Functions for scripts migrated from Colossal-AI, beside :mod:`unipar.migrated.script`.

Names and arguments are those of Colossal-AI where the meaning is; Colossal-AI itself is not
imported.
"""

from __future__ import annotations

from unipar.migrated.boosted.data import loader
from unipar.migrated.boosted.logs import Logger, get_dist_logger
from unipar.migrated.boosted.processes import Coordinator, launch
from unipar.migrated.boosted.states import (
    load_lr_scheduler,
    load_model,
    load_optimizer,
    save_lr_scheduler,
    save_model,
    save_optimizer,
)

__all__ = [
    "Coordinator", "Logger", "get_dist_logger", "launch", "load_lr_scheduler", "load_model",
    "load_optimizer", "loader", "save_lr_scheduler", "save_model", "save_optimizer",
]  # fmt: skip
