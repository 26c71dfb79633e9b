"""What a test has left behind that should have ended."""

from __future__ import annotations

import os

import psutil


def processes_of(scratch: str) -> list[str]:
    """The commands of the other processes whose directory for temporary files is ``scratch``."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("TMPDIR") == scratch:
                left.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return left
