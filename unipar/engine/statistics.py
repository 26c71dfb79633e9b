"""Statistics of batch norms, which a step that is left out leaves as they were."""

from __future__ import annotations

import torch
from torch import nn

from unipar.engine.broadcast import with_copies


class KeptStatistics:
    """Those of a module before a step."""

    def __init__(self) -> None:
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, module: nn.Module | None) -> None:
        """Copy what forward passes are to change.

        Args:
            module: whose batch norms; ``None``: nothing is to be put back.
        """
        norms = [
            one for one in (() if module is None else module.modules())
            if one.training and getattr(one, "running_mean", None) is not None
        ]  # fmt: skip
        self._kept = with_copies(buffer for one in norms for buffer in one.buffers(recurse=False))

    def put_back(self) -> None:
        """Undo what forward passes have changed since."""
        for one, before in self._kept:
            one.copy_(before)
