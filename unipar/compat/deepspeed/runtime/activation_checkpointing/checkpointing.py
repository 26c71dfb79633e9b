"""The module behind ``deepspeed.checkpointing``, which scripts import by this name, too."""

from __future__ import annotations

from unipar.compat.deepspeed.checkpointing import (
    checkpoint,
    configure,
    is_configured,
    non_reentrant_checkpoint,
    partition_activations_in_checkpoint,
    reset,
    set_num_layers,
)
from unipar.compat.deepspeed_names import CHECKPOINTING

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint",
           "partition_activations_in_checkpoint", "reset", "set_num_layers"]  # fmt: skip

__getattr__ = CHECKPOINTING.refusing(__name__)
