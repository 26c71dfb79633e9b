"""``deepspeed.runtime.activation_checkpointing``: what scripts import from the module below it."""

from __future__ import annotations

from unipar.compat.deepspeed.runtime.activation_checkpointing import checkpointing
from unipar.compat.tables import Table

__all__ = ["checkpointing"]

__getattr__ = Table("deepspeed.runtime.activation_checkpointing").refusing(__name__)
