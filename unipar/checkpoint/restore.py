"""The choice of the checkpoint to load: the one named, or the newest undamaged one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from unipar.checkpoint.checking import verify
from unipar.checkpoint.decode import open_checkpoint
from unipar.checkpoint.directory import candidates, is_checkpoint
from unipar.checkpoint.load import agree, load_one
from unipar.checkpoint.manifest import Manifest
from unipar.errors import CheckpointError
from unipar.strategy import Engine
from unipar.world import World

logger = logging.getLogger(__name__)


def load(
    path: str | Path,
    engines: Mapping[str, Engine],
    world: World,
    *,
    optimizer: bool = True,
    scheduler: bool = True,
) -> Manifest:
    """Restore engines from a checkpoint, written under any strategy by any number of ranks.

    Collective. Random number generators are restored too if as many ranks wrote the checkpoint,
    and the same ones of them drew alike (parts of the same layers do); else each rank is reseeded
    from (``progress["seed"]``, its stream, step).

    Args:
        path: a checkpoint, or a directory of them, of which the newest is taken that is not
            damaged.
        engines: by the names that they were saved under.
        world: the run's processes.
        optimizer: whether to restore training state (optimizer, scheduler, scaler, generators), or
            the weights alone. A checkpoint made from bare weights has nothing else.
        scheduler: whether schedulers are the engines'; else the caller has them, and restores them.

    Returns:
        the manifest: step, progress, metrics.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or does not fit the engines. Raised on
            every rank. Engines may be filled in part by then.
        ConfigError: it was saved with another optimizer or scheduler, or without one. Raised on
            every rank, before anything is filled.
    """
    found = None
    if not is_checkpoint(path):
        found = load_newest(path, engines, world, optimizer=optimizer, scheduler=scheduler)
    return found or load_one(Path(path), engines, world, optimizer=optimizer, scheduler=scheduler)


def load_newest(
    directory: str | Path,
    engines: Mapping[str, Engine],
    world: World,
    *,
    optimizer: bool = True,
    scheduler: bool = True,
) -> Manifest | None:
    """Restore engines from the newest checkpoint in a directory that is not damaged. Collective.

    What is passed over is logged, with the file and what is wrong with it.

    Returns:
        the manifest, or ``None`` where the directory holds no checkpoint, damaged or not.

    Raises:
        CheckpointError: there are checkpoints, and all of them are damaged; or as :func:`load`.
        ConfigError: as :func:`load`.
    """
    older: Iterator[Path] = iter(())
    error = None
    if world.is_main:
        try:
            older = iter(candidates(Path(directory)))
        except OSError as failure:
            error = f"Cannot look for checkpoints in {directory}: {failure.strerror}."
    agree(world, error)
    passed: list[str] = []
    verifying = False
    while True:
        path = _next_sound(older, passed, verifying) if world.is_main else None
        path, passed = world.broadcast((path, passed))
        if path is None:
            break
        try:
            return load_one(path, engines, world, optimizer=optimizer, scheduler=scheduler)
        except CheckpointError as error:
            # What is read is verified as it is read, so all of a checkpoint is read for that alone
            # only when one turns out to be damaged: an older one must not take its place because
            # the newest is, say, of another model.
            if world.broadcast(_damage(path) if world.is_main else None) is None:
                raise
            passed.append(_pass_over(path, error, log=world.is_main))
            verifying = True
    if passed:
        raise CheckpointError(
            f"None of the {len(passed)} checkpoints in {directory} can be read:\n"
            + "\n".join(passed)
            + "\nRestore one of them, or remove them or choose another directory to begin afresh."
        )
    return None


def _next_sound(older: Iterator[Path], passed: list[str], verifying: bool) -> Path | None:
    """The next checkpoint that has all of its files, and what they should hold where asked."""
    for path in older:
        try:
            open_checkpoint(path)
            if verifying:
                verify(path)
        except CheckpointError as error:
            passed.append(_pass_over(path, error, log=True))
        else:
            return path
    return None


def _damage(path: Path) -> str | None:
    try:
        verify(path)
    except CheckpointError as error:
        return str(error)
    return None


def _pass_over(path: Path, error: CheckpointError, *, log: bool) -> str:
    if log:
        logger.warning("Passing over %s: %s", path, error)
    return f"{path.name}: {error}"
