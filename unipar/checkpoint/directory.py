"""A directory of checkpoints: which there are, and which are kept."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unipar.checkpoint.manifest import MANIFEST, read_manifest
from unipar.errors import CheckpointError

_STEP = re.compile(r"step-(\d{8,})")
_UNFINISHED = ".unfinished-"


def step_name(step: int) -> str:
    """The name of the checkpoint of ``step``."""
    return f"step-{step:08d}"


def unfinished(directory: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is written until it is complete."""
    return directory / f"{_UNFINISHED}{step_name(step)}"


def checkpoints(directory: str | Path) -> list[Path]:
    """The complete checkpoints in ``directory``, oldest step first."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    found = {
        int(match[1]): path
        for path in directory.iterdir()
        if (match := _STEP.fullmatch(path.name)) and (path / MANIFEST).is_file()
    }
    return [found[step] for step in sorted(found)]


def newest(directory: str | Path) -> Path | None:
    """The complete checkpoint of the latest step in ``directory``, if there is one.

    One whose manifest is damaged is passed over for the one before it.
    """
    for path in reversed(checkpoints(directory)):
        try:
            read_manifest(path)
        except CheckpointError:
            continue
        return path
    return None


def find(path: str | Path) -> Path:
    """The checkpoint that ``path`` is, or the newest of the directory that it is.

    Raises:
        CheckpointError: it is neither.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return path
    found = newest(path)
    if found is None:
        raise CheckpointError(
            f"{path} is no checkpoint, nor a directory of complete checkpoints. "
            + (
                f"It holds: {', '.join(sorted(p.name for p in path.iterdir())[:8]) or 'nothing'}."
                if path.is_dir()
                else "It does not exist."
            )
        )
    return found


def clean(directory: Path) -> None:
    """Remove what earlier saves left when they were cut off."""
    for path in directory.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay.

    Attributes:
        keep_last: how many of the newest; ``None`` keeps all.
        keep_best: a metric and whether its lowest or highest is best; that checkpoint stays too.
    """

    keep_last: int | None = None
    keep_best: tuple[str, Literal["min", "max"]] | None = None

    def apply(self, directory: str | Path) -> list[Path]:
        """Remove the others; call it on one rank, when no save is under way.

        Returns:
            What was removed.
        """
        if self.keep_last is None:
            return []
        found = checkpoints(directory)
        kept = set(found[-self.keep_last :])
        best = self._best(found)
        if best is not None:
            kept.add(best)
        removed = [path for path in found if path not in kept]
        for path in removed:
            # Renamed first: a directory half removed must not look complete.
            doomed = path.with_name(f"{_UNFINISHED}{path.name}-old")
            path.rename(doomed)
            shutil.rmtree(doomed)
        return removed

    def _best(self, found: list[Path]) -> Path | None:
        if self.keep_best is None:
            return None
        metric, mode = self.keep_best
        scored: list[tuple[float, Path]] = []
        for path in found:
            value = read_manifest(path).metrics.get(metric)
            if value is not None and value == value:
                scored.append((value, path))
        if not scored:
            return None
        choose = min if mode == "min" else max
        # Of equals the newest stays.
        return choose(reversed(scored), key=lambda pair: pair[0])[1]
