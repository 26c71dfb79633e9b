"""A directory of checkpoints: which there are, which is newest, and how one gets its name."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from unipar.checkpoint.decode import open_checkpoint
from unipar.checkpoint.files import sync_directory
from unipar.checkpoint.manifest import MANIFEST, Manifest
from unipar.checkpoint.names import REPLACED, TEMPORARY, named_step
from unipar.errors import CheckpointError

logger = logging.getLogger(__name__)


def checkpoints(directory: str | Path) -> list[Path]:
    """The complete checkpoints in a directory, by step, the newest last."""
    return [manifest.path for manifest in complete(directory)][::-1]


def newest(directory: str | Path) -> Path | None:
    """The newest complete checkpoint in a directory, or ``None``.

    Complete means that its manifest is valid and that every file has its size; incomplete ones are
    passed over with a warning. The data's checksums are verified when they are read.
    """
    return next((manifest.path for manifest in complete(directory)), None)


def is_checkpoint(path: str | Path) -> bool:
    """Return whether ``path`` is a checkpoint itself, complete or not, and no directory of them."""
    path = Path(path)
    return (path / MANIFEST).exists() or (path.is_dir() and named_step(path.name) is not None)


def find(path: str | Path) -> Path:
    """The checkpoint at ``path``: itself, or the newest in it if it is a directory of checkpoints.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(path)
    if is_checkpoint(path):
        return path
    found = newest(path)
    if found is None:
        held = ", ".join(sorted(p.name for p in path.iterdir())[:8]) if path.is_dir() else ""
        raise CheckpointError(
            f"{path} is no checkpoint, nor a directory of complete checkpoints. "
            + (f"It holds: {held or 'nothing'}." if path.is_dir() else "It does not exist.")
        )
    return found


def complete(directory: str | Path) -> Iterator[Manifest]:
    """The manifests of the complete checkpoints in a directory, the newest first."""
    for path in candidates(Path(directory)):
        try:
            manifest = open_checkpoint(path)
        except CheckpointError as error:
            logger.warning("Passing over %s: %s", path, error)
        else:
            yield manifest


def candidates(directory: Path) -> list[Path]:
    """Directories named like checkpoints, the newest first."""
    found: dict[int, Path] = {}
    if directory.is_dir():
        for path in directory.iterdir():
            if (step := named_step(path.name)) is not None and path.is_dir():
                found[step] = path
        # A crash while a step was being saved again can leave it under this name alone.
        for path in directory.glob(f"{REPLACED}step-*"):
            if (step := named_step(path.name.removeprefix(REPLACED))) is not None:
                found.setdefault(step, path)
    return [found[step] for step in sorted(found, reverse=True)]


def clean(directory: Path) -> None:
    """Remove what interrupted saves left behind, and undo a replacement that was cut off."""
    for path in directory.glob(f"{REPLACED}step-*"):
        original = path.with_name(path.name.removeprefix(REPLACED))
        if original.exists():
            remove(path)
        else:
            path.rename(original)
    for path in directory.glob(f"{TEMPORARY}step-*"):
        # A thread may be removing it; what is left of a save's is found when it is made anew.
        shutil.rmtree(path, ignore_errors=True)


def publish(temporary: Path, final: Path) -> None:
    """Give a finished checkpoint its name, durably; one of the same name is replaced."""
    replaced = final.with_name(f"{REPLACED}{final.name}")
    replacing = final.exists()
    if replacing:
        final.rename(replaced)
    temporary.rename(final)
    sync_directory(final.parent)
    if replacing:
        remove(replaced)


def remove(path: Path) -> None:
    """Remove a checkpoint so that it never looks like one when it is half gone."""
    doomed = path.with_name(f"{TEMPORARY}{path.name.removeprefix(REPLACED)}-removed")
    if doomed.exists():
        shutil.rmtree(doomed)
    path.rename(doomed)
    try:
        shutil.rmtree(doomed)
    except FileNotFoundError:
        # A save that began meanwhile clears away what it finds.
        shutil.rmtree(doomed, ignore_errors=True)
