"""Where each worker stands, written where the launching process can read it after a crash."""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<qqd32s")
_buffer: mmap.mmap | bytearray | None = None
_count = 0


@dataclass(frozen=True)
class Mark:
    """A worker's last mark.

    Attributes:
        step: 1-based.
        phase: what the step was doing.
        time: when the mark was set, in monotonic seconds.
        count: how many it has set until then. All ranks set the same ones, so one with fewer of
            them is behind.
    """

    step: int
    phase: str
    time: float
    count: int


def mark(step: int, phase: str = "") -> None:
    """Note that this worker is in ``step`` (1-based), so that a failure report can say so.

    Costs well under a microsecond: it writes to memory that outlives the process. Does nothing in
    a process that is one of no run.

    Args:
        step: the training step, counted from 1.
        phase: a short word for what the step is doing; cut after 32 bytes.
    """
    global _count
    if _buffer is not None:
        _count += 1
        _LAYOUT.pack_into(_buffer, 0, _count, step, time.monotonic(), phase.encode())


def open_marks(path: Path | None) -> None:
    """Make :func:`mark` write to ``path`` from now on, or without one to this process's memory."""
    global _buffer, _count
    _count = 0
    if path is None:
        _buffer = bytearray(_LAYOUT.size)
        return
    with path.open("w+b") as file:
        file.truncate(_LAYOUT.size)
        _buffer = mmap.mmap(file.fileno(), _LAYOUT.size)


def watched() -> bool:
    """Return whether the launching process reads the marks of this one."""
    return isinstance(_buffer, mmap.mmap)


def own_mark() -> Mark | None:
    """This process's last mark, or ``None`` if it never set one."""
    return None if _buffer is None else _unpack(bytes(_buffer[: _LAYOUT.size]))


def read_mark(path: Path) -> Mark | None:
    """The last mark in ``path``, or ``None`` if its worker never set one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return _unpack(data[: _LAYOUT.size]) if len(data) >= _LAYOUT.size else None


def _unpack(data: bytes) -> Mark | None:
    count, step, when, phase = _LAYOUT.unpack(data)
    word = phase.rstrip(b"\0").decode(errors="replace")
    return Mark(step, word, when, count) if step else None
