"""A directory of checkpoints: which there are, which is newest, and how one gets its name."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from unipar.checkpoint.files import sync_directory
from unipar.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from unipar.errors import CheckpointError

logger = logging.getLogger(__name__)

TEMPORARY = ".tmp-"
REPLACED = ".old-"
_NAME = re.compile(r"step-(\d{8,})")


def step_name(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step of the checkpoint of this name, as :func:`step_name` gives it."""
    match = _NAME.fullmatch(path.name)
    assert match, path
    return int(match[1])


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
    """Whether ``path`` is a checkpoint itself, complete or not, rather than a directory of them."""
    path = Path(path)
    return (path / MANIFEST).exists() or (path.is_dir() and bool(_NAME.fullmatch(path.name)))


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
            manifest = read_manifest(path)
            check_sizes(manifest)
        except CheckpointError as error:
            logger.warning("Passing over %s: %s", path, error)
        else:
            yield manifest


def candidates(directory: Path) -> list[Path]:
    """Directories named like checkpoints, the newest first."""
    found: dict[int, Path] = {}
    if directory.is_dir():
        for path in directory.iterdir():
            if (match := _NAME.fullmatch(path.name)) and path.is_dir():
                found[int(match[1])] = path
        # A crash while a step was being saved anew can leave it under this name alone.
        for path in directory.glob(f"{REPLACED}step-*"):
            if match := _NAME.fullmatch(path.name.removeprefix(REPLACED)):
                found.setdefault(int(match[1]), path)
    return [found[step] for step in sorted(found, reverse=True)]


def check_sizes(manifest: Manifest) -> None:
    """Hold that every file of a checkpoint exists and has its size.

    Raises:
        CheckpointError: one does not; it is named.
    """
    for name, info in manifest.files.items():
        file = manifest.path / name
        try:
            size = file.stat().st_size
        except OSError as error:
            raise CheckpointError(f"Cannot open {file}: {error.strerror}.") from error
        if size != info.size:
            raise CheckpointError(
                f"{file} is damaged: it has {size} bytes and should have {info.size}."
            )


def clean(directory: Path) -> None:
    """Remove what interrupted saves left behind, and undo a replacement that was cut off."""
    for path in directory.glob(f"{REPLACED}step-*"):
        original = path.with_name(path.name.removeprefix(REPLACED))
        if original.exists():
            remove(path)
        else:
            path.rename(original)
    for path in directory.glob(f"{TEMPORARY}step-*"):
        shutil.rmtree(path)


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
    shutil.rmtree(doomed)
