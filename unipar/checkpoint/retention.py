"""Retention: which checkpoints are kept."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unipar.checkpoint.directory import complete, remove
from unipar.checkpoint.manifest import Manifest
from unipar.errors import ConfigError

logger = logging.getLogger(__name__)

Best = tuple[str, Literal["min", "max"]]


@dataclass(frozen=True)
class Retention:
    """Which checkpoints to keep; the newest always is.

    Attributes:
        keep_last: how many of the newest; ``None`` keeps all.
        keep_best: a metric and whether its ``"min"`` or ``"max"`` is best: that checkpoint is kept
            too. Several such pairs keep the best of each.

    Raises:
        ConfigError: ``keep_last`` is below 1, or a mode is neither ``"min"`` nor ``"max"``.
    """

    keep_last: int | None = None
    keep_best: Best | Sequence[Best] | None = None

    def __post_init__(self) -> None:
        if self.keep_last is not None and self.keep_last < 1:
            raise ConfigError(
                f"keep_last={self.keep_last} would keep no checkpoint. Give 1 or more, or None to "
                "keep all."
            )
        for metric, mode in self._bests():
            if mode not in ("min", "max"):
                raise ConfigError(
                    f"keep_best of '{metric}' has mode '{mode}'. Give 'min' or 'max'."
                )

    def _bests(self) -> list[tuple[str, str]]:
        if not self.keep_best:
            return []
        if isinstance(self.keep_best[0], str):
            metric, mode = self.keep_best
            return [(str(metric), str(mode))]
        return [(str(metric), str(mode)) for metric, mode in self.keep_best]

    def apply(self, directory: str | Path) -> list[Path]:
        """Remove the others; call it on one rank, when no save is under way.

        Incomplete checkpoints are let be. One that cannot be removed is logged as an error: the
        run need not end for it.

        Returns:
            what was removed.
        """
        if self.keep_last is None:
            return []
        found = list(complete(directory))
        keep = {manifest.path for manifest in found[: self.keep_last]}
        keep.update(path for metric, mode in self._bests() if (path := _best(found, metric, mode)))
        removed = []
        for path in (manifest.path for manifest in found if manifest.path not in keep):
            try:
                remove(path)
            except OSError as error:
                logger.error("Cannot remove the old checkpoint %s: %s", path, error)
            else:
                removed.append(path)
        return removed


def _best(found: Sequence[Manifest], metric: str, mode: str) -> Path | None:
    """The checkpoint with the best value of a metric: of equals the newest."""
    sign = 1 if mode == "max" else -1
    scored = [
        (sign * value, manifest.step, manifest.path)
        for manifest in found
        if math.isfinite(value := manifest.metrics.get(metric, math.nan))
    ]
    return max(scored)[2] if scored else None
