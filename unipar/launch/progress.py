"""Where each worker stands, written where the launching process can read it after a crash."""

from __future__ import annotations

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<qd32s")
_buffer: mmap.mmap | None = None


@dataclass(frozen=True)
class Mark:
    """A worker's last mark: its step (1-based), its phase, and when it was set (monotonic s)."""

    step: int
    phase: str
    time: float


def mark(step: int, phase: str = "") -> None:
    """Note that this worker is in ``step`` (1-based), so that a failure report can say so.

    Costs well under a microsecond: it writes to memory that outlives the process. Does nothing in
    a process that :func:`unipar.launch.run` did not start.

    Args:
        step: the training step, counted from 1.
        phase: a short word for what the step is doing; cut after 32 bytes.
    """
    if _buffer is not None:
        _LAYOUT.pack_into(_buffer, 0, step, time.monotonic(), phase.encode())


def open_marks(path: Path) -> None:
    """Make :func:`mark` write to ``path`` from now on."""
    global _buffer
    with path.open("w+b") as file:
        file.truncate(_LAYOUT.size)
        _buffer = mmap.mmap(file.fileno(), _LAYOUT.size)


def read_mark(path: Path) -> Mark | None:
    """The last mark in ``path``, or ``None`` if its worker never set one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < _LAYOUT.size:
        return None
    step, when, phase = _LAYOUT.unpack(data[: _LAYOUT.size])
    return Mark(step, phase.rstrip(b"\0").decode(errors="replace"), when) if step else None
