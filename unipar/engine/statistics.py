"""Statistics of batch norms, which a step that is left out leaves as they were."""

from __future__ import annotations

import torch
from torch import nn

from unipar.engine.broadcast import with_copies


class KeptStatistics:
    """Those of a module before a step.

    Args:
        module: whose batch norms.
    """

    def __init__(self, module: nn.Module) -> None:
        # Found once: it is kept in every step.
        self._norms = [
            one for one in module.modules() if getattr(one, "running_mean", None) is not None
        ]
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self) -> None:
        """Copy what forward passes are to change."""
        norms = [one for one in self._norms if one.training]
        self._kept = with_copies(buffer for one in norms for buffer in one.buffers(recurse=False))

    def forget(self) -> None:
        """Have nothing to put back."""
        self._kept = []

    def put_back(self) -> None:
        """Undo what forward passes have changed since."""
        for one, before in self._kept:
            one.copy_(before)
