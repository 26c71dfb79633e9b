"""The dialects, those that their imports tell apart first."""

from __future__ import annotations

from unipar.migrate.dialects.accelerate import Accelerate
from unipar.migrate.dialects.base import Dialect, Row
from unipar.migrate.dialects.colossalai import ColossalAI
from unipar.migrate.dialects.deepspeed import DeepSpeed
from unipar.migrate.dialects.fabric import Fabric
from unipar.migrate.dialects.face import FaceDialect
from unipar.migrate.dialects.horovod import Horovod
from unipar.migrate.dialects.native import Ddp, Fsdp, Torch

DIALECTS: tuple[Dialect, ...] = (
    Fabric(),
    Accelerate(),
    ColossalAI(),
    DeepSpeed(),
    Horovod(),
    Fsdp(),
    Ddp(),
    Torch(),
)

__all__ = ["DIALECTS", "Dialect", "FaceDialect", "Row"]
