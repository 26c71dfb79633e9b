"""The fields of a run, and where they come from: a file, the environment, flags and arguments."""

from __future__ import annotations

from unipar.config.fields import (
    UNSET,
    CheckpointConfig,
    RunConfig,
    RunFields,
    Unset,
    holds,
    validate,
)
from unipar.config.optimizers import (
    OptimizerConfig,
)

__all__ = [
    "UNSET",
    "CheckpointConfig",
    "OptimizerConfig",
    "RunConfig",
    "RunFields",
    "Unset",
    "holds",
    "validate",
]
