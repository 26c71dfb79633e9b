"""What a test has left behind that should have ended."""

from __future__ import annotations

import os

import psutil

from unipar.testing import programs


def processes_of(scratch: str) -> list[str]:
    """The commands of the other processes whose directory for temporary files is ``scratch``.

    Of programs that were forked all that run: what the system knows of their environment is that
    of the process that they were forked from. Each is a child of this process, or comes to be one.
    """
    left = [f"forked program {process.pid}" for process in programs.running()]
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("TMPDIR") == scratch:
                left.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return left
