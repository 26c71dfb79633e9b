"""Optimizers and schedules."""

from __future__ import annotations

from unipar.compat.colossalai.nn import lr_scheduler, optimizer
from unipar.compat.colossalai.nn.lr_scheduler import *  # noqa: F403
from unipar.compat.colossalai.nn.optimizer import *  # noqa: F403
from unipar.compat.colossalai_names import NN

__all__ = ["lr_scheduler", "optimizer", *lr_scheduler.__all__, *optimizer.__all__]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__ = NN.refusing(__name__)
