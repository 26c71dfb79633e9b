"""The optimizer that :meth:`Accelerator.prepare` gives back, under Accelerate's name."""

from __future__ import annotations

from unipar.compat.optimizers import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
