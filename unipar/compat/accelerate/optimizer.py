"""The optimizer that :meth:`Accelerator.prepare` gives back, under Accelerate's name."""

from __future__ import annotations

from unipar.compat.optimizers import PreparedOptimizer as AcceleratedOptimizer
from unipar.compat.tables import Table

__all__ = ["AcceleratedOptimizer"]

__getattr__ = Table("accelerate.optimizer").refusing(__name__)
