"""``ReduceLROnPlateau``: ranks that share batches see one metric, or their rates would part."""

from __future__ import annotations

from typing import Any

from torch.optim import lr_scheduler

from unipar.compat.adopting import adoption
from unipar.compat.run import current


class ReduceLROnPlateau(lr_scheduler.ReduceLROnPlateau):
    """torch's. Where the script knows nothing of ranks, its metric is the mean over them."""

    def step(self, metrics: Any, epoch: int | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Look at a metric. Collective where ranks share batches."""
        if not adoption.aware and current.placement().size > 1:
            found = current.world().gather(float(metrics))
            metrics = found[0] if len(set(found)) == 1 else sum(found) / len(found)
        super().step(metrics) if epoch is None else super().step(metrics, epoch)
