"""``deepspeed.ops``: optimizers."""

from __future__ import annotations

from unipar.compat.deepspeed.ops import adam
from unipar.compat.deepspeed_names import OPS

__all__ = ["adam"]

__getattr__ = OPS.refusing(__name__)
