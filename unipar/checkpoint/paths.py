"""Opening what others have written: regular files alone, none of them outside its place."""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath

from unipar.errors import CheckpointError

MAX_NAME = 4096
_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def is_plain(name: str) -> bool:
    """Return whether ``name`` is a relative path without ``..``, in its shortest form."""
    path = PurePosixPath(name)
    return (
        0 < len(name) <= MAX_NAME
        and str(path) == name != "."
        and not path.is_absolute()
        and ".." not in path.parts
        and "\0" not in name
    )


def inside(root: Path, name: str) -> Path:
    """The path of ``name`` in ``root``, which is where its links lead too.

    ``root`` itself may be a link, or lie behind one.

    Raises:
        CheckpointError: a link leads out of ``root``.
    """
    path = root / name
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise CheckpointError(
            f"{path} is a link that leads out of {root}, and is not followed. If you trust it, put "
            "a copy of what it leads to in its place."
        )
    return path


def open_regular(path: Path) -> int:
    """Open a regular file for reading, and return its descriptor.

    Reading a FIFO or a device can wait for ever, or never end, so neither is opened.

    Raises:
        CheckpointError: there is none, it cannot be opened, or it is no regular file.
    """
    try:
        _check_regular(path, os.stat(path))
        # Should it have been replaced since, opening a FIFO does not wait.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
        fd = os.open(path, flags)
    except OSError as error:
        raise CheckpointError(f"Cannot open {path}: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(f"Cannot open {str(path)!r}: {error}.") from error
    try:
        _check_regular(path, os.fstat(fd))
    except CheckpointError:
        os.close(fd)
        raise
    return fd


def size_of(path: Path) -> int:
    """Bytes of a regular file.

    Raises:
        CheckpointError: there is none, or it is no regular file.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise CheckpointError(f"Cannot open {path}: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(f"Cannot open {str(path)!r}: {error}.") from error
    _check_regular(path, found)
    return found.st_size


def read_bytes(path: Path, most: int) -> bytes:
    """The contents of a regular file of no more than ``most`` bytes.

    Raises:
        CheckpointError: it cannot be read, or is longer.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise CheckpointError(f"{path} has {size} bytes; no more than {most} are read.")
        try:
            return file.read(size)
        except OSError as error:
            raise CheckpointError(f"Cannot read {path}: {error.strerror}.") from error


def _check_regular(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = next((kind for is_kind, kind in _KINDS if is_kind(found.st_mode)), "something else")
        raise CheckpointError(f"{path} is {kind}, not a regular file, and is not read.")
