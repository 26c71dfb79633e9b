"""Files of a run as they are found: being written, cut short, or not what their names say."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MOST = 64 * 2**20
"""The bytes that are read of one file: its last ones."""


class NotReadableError(Exception):
    """A file or directory cannot be read; the message is one line."""


def read_end(path: Path, most: int = MOST) -> bytes | None:
    """The last ``most`` bytes of a file, or ``None`` where there is none.

    Raises:
        NotReadableError: it is no regular file, or may not be read.
    """
    try:
        # Not blocking: a pipe of this name would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NotReadableError(f"{path.name}: {error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise NotReadableError(f"{path.name} is not a regular file")
        with open(descriptor, "rb", closefd=False) as file:
            file.seek(max(0, status.st_size - most))
            return file.read(most)
    except OSError as error:
        raise NotReadableError(f"{path.name}: {error.strerror}") from error
    finally:
        os.close(descriptor)


def rows(data: bytes) -> Iterator[dict[str, Any] | None]:
    """The JSON objects of lines; ``None`` for each whole line that is none.

    A last line without an end is being written, and left out; so is a first one that was cut, where
    ``data`` is the end of a longer file.
    """
    lines = data.split(b"\n")[:-1]
    if len(data) >= MOST:
        lines = lines[1:]
    for line in lines:
        if not line:
            continue
        try:
            row = json.loads(line) if len(line) < 2**20 else None
        except (ValueError, RecursionError):
            row = None
        yield row if isinstance(row, dict) else None


def number(value: Any) -> float | None:
    """``value`` if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def whole(value: Any) -> int | None:
    """``value`` if it is a count, from 0."""
    return value if type(value) is int and 0 <= value < 2**63 else None


def line(value: Any, most: int = 200) -> str | None:
    """``value`` if it is text, without what a terminal would obey."""
    if not isinstance(value, str):
        return None
    return "".join(char if char.isprintable() else " " for char in value)[:most]
