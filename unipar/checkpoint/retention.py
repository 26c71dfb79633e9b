"""Retention: which checkpoints are kept."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from unipar.checkpoint.directory import candidates, remove
from unipar.checkpoint.names import step_of
from unipar.errors import ConfigError
from unipar.utils.listing import Listed, Scored, kept, list_checkpoints

logger = logging.getLogger(__name__)

Best = tuple[str, Literal["min", "max"]]


_Saved = TypeVar("_Saved", bound=Scored)


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

    def surplus(self, found: Sequence[_Saved], newest: int | None = None) -> list[_Saved]:
        """Those checkpoints that need not be kept.

        Args:
            found: all that there are, the newest first.
            newest: the step that the run has saved last. Those of later steps it has passed over,
                for they are damaged: they do not count, and are let be.
        """
        if self.keep_last is None:
            return []
        own = found if newest is None else [saved for saved in found if saved.step <= newest]
        keep = kept(own, self.keep_last, self._bests())
        return [saved for saved in own if saved.path not in keep]

    def apply(self, directory: str | Path, newest: int | None = None) -> list[Path]:
        """Remove the others; call it on one rank, when no save is under way.

        Incomplete checkpoints are let be. One that cannot be removed is logged as an error: the
        run need not end for it.

        Args:
            directory: of the checkpoints.
            newest: as for :meth:`surplus`.

        Returns:
            what was removed.
        """
        if self.keep_last is None:
            return []
        removed = []
        for path in (saved.path for saved in self.surplus(_whole(Path(directory)), newest)):
            try:
                remove(path)
            except OSError as error:
                logger.error("Cannot remove the old checkpoint %s: %s", path, error)
            else:
                removed.append(path)
        return removed


def _whole(directory: Path) -> list[Listed]:
    """The whole checkpoints of a directory, the newest first.

    Of each, its checksum and the sizes of its files are held: to check each tensor's description,
    as for reading, keeps a training step of another thread waiting for the interpreter.
    """
    found = {one.path: one for one in list_checkpoints(directory) if one.problem is None}
    return [found[path] for path in candidates(directory) if path in found]


def keep_newest(
    directory: Path, number: int, needed: Collection[Path], newest: int | None = None
) -> None:
    """Remove all checkpoints of a directory but the newest, and those that are still needed.

    A checkpoint counts by its name: of one that is divided among disks, no disk has all.

    Args:
        directory: of the checkpoints.
        number: how many of the newest stay.
        needed: what stays besides.
        newest: as for :meth:`Retention.surplus`.
    """
    found = candidates(directory)
    if newest is not None:
        found = [path for path in found if step_of(path) <= newest]
    for path in found[number:]:
        if path in needed:
            continue
        try:
            remove(path)
        except OSError as error:
            logger.error("Cannot remove the old checkpoint %s: %s", path, error)
