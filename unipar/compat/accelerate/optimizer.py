"""The optimizer that :meth:`Accelerator.prepare` gives back, under Accelerate's name."""

from __future__ import annotations

from typing import Any

from unipar.compat.optimizers import PreparedOptimizer
from unipar.compat.tables import Table

__all__ = ["AcceleratedOptimizer"]

__getattr__ = Table("accelerate.optimizer").refusing(__name__)


class AcceleratedOptimizer(PreparedOptimizer):
    """A prepared optimizer whose modes may be set whether it has some or none."""

    def train(self) -> None:
        """Put the weights into the model that it steps by, as schedule-free optimizers do."""
        self._set_mode("train")

    def eval(self) -> None:
        """Put the weights into the model that an evaluation is of."""
        self._set_mode("eval")

    def _set_mode(self, mode: str) -> None:
        # Accelerate 1.15, optimizer.py: nothing where the optimizer has no such method.
        set_mode: Any = getattr(self.optimizer, mode, None)
        if callable(set_mode):
            set_mode()
