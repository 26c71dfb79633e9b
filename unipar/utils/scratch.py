"""Directories that go with the process that made them, at the latest when the next one is made."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from unipar.errors import ConfigError

PREFIX = "unipar."
"""Short, for processes make sockets in such directories, and their paths may have 107 bytes."""


@contextlib.contextmanager
def scratch(parent: Path | None = None, *, prefix: str = PREFIX) -> Iterator[Path]:
    """A private directory for the length of the block.

    What a process leaves that is killed within the block is removed by the next call for the same
    place, of any process of the same user: the lock on a directory ends with its process.

    Args:
        parent: where it is made; left out: the system's place for temporary files.
        prefix: what the names of such directories begin with, and of nothing else there.

    Raises:
        ConfigError: the system's place for temporary files has no room.
    """
    with temporary_files() if parent is None else contextlib.nullcontext():
        where = parent or Path(tempfile.gettempdir())
        sweep(where, prefix=prefix)
        directory, lock = _make(where, prefix)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def sweep(parent: Path, *, prefix: str = PREFIX) -> None:
    """Remove what processes of this user have left in ``parent`` when they were killed."""
    with os.scandir(parent) as found:
        left = [Path(one.path) for one in found if one.name.startswith(prefix)]
    for directory in left:
        lock = _lock(directory)
        if lock is not None:
            # The name may have come to be another's while the lock was taken.
            if _is_at(lock, directory):
                shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def _make(parent: Path, prefix: str) -> tuple[Path, int]:
    while True:
        directory = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            # Another process swept it before it was locked.
            continue
        # Some network file systems have no locks; nothing there can be told to be dead, either.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_SH)
        if _is_at(lock, directory):
            return directory, lock
        os.close(lock)


def _lock(directory: Path) -> int | None:
    """A descriptor that locks a directory of ours, or ``None`` where it is in use or foreign."""
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    status = os.fstat(lock)
    if status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
    os.close(lock)
    return None


def _is_at(descriptor: int, directory: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(directory))
    except FileNotFoundError:
        return False


def no_room(error: OSError) -> ConfigError:
    """The error for temporary files that cannot be written."""
    return ConfigError(f"a temporary file cannot be written: {error.strerror}. {tmpdir_remedy()}")


def tmpdir_remedy() -> str:
    """Say what to do where the temporary directory is full."""
    directory = tempfile.tempdir or os.environ.get("TMPDIR") or "/tmp"
    return (
        f"The temporary directory is {directory}: make room in it, or set the environment variable "
        "TMPDIR to a directory that has some."
    )


@contextlib.contextmanager
def temporary_files() -> Iterator[None]:
    """Around what writes temporary files, and nothing else."""
    try:
        yield
    except OSError as error:
        raise no_room(error) from error
