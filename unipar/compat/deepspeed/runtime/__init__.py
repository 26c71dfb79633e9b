"""``deepspeed.runtime``: what scripts import from modules below it."""

from __future__ import annotations

from unipar.compat.deepspeed.data import DeepSpeedDataLoader, RepeatingLoader
from unipar.compat.deepspeed.engine import DeepSpeedEngine
from unipar.compat.deepspeed.runtime import lr_schedules, zero
from unipar.compat.deepspeed.utils import see_memory_usage
from unipar.compat.deepspeed_names import RUNTIME

__all__ = ["DeepSpeedDataLoader", "DeepSpeedEngine", "RepeatingLoader", "lr_schedules",
           "see_memory_usage", "zero"]  # fmt: skip

__getattr__ = RUNTIME.refusing(__name__)
