"""Statistics of batch norms, which a step that is left out leaves as they were."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from unipar.engine.broadcast import by_kind


class KeptStatistics:
    """Those of a module before a step."""

    def __init__(self) -> None:
        self._kept: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

    def keep(self, module: nn.Module | None) -> None:
        """Copy what forward passes are to change: by one kernel on a GPU for each dtype.

        Args:
            module: whose batch norms; ``None``: nothing is to be put back.
        """
        norms = [
            one for one in (() if module is None else module.modules())
            if isinstance(one, _NormBase) and one.training and one.track_running_stats
        ]  # fmt: skip
        found = by_kind(buffer.detach() for one in norms for buffer in one.buffers(recurse=False))
        copies = [[torch.empty_like(one) for one in alike] for alike in found]
        self._kept = list(zip(found, copies, strict=True))
        for alike, own in self._kept:
            torch._foreach_copy_(own, alike)  # pyright: ignore[reportPrivateImportUsage]

    def put_back(self) -> None:
        """Undo what forward passes have changed since."""
        for alike, own in self._kept:
            torch._foreach_copy_(alike, own)  # pyright: ignore[reportPrivateImportUsage]
