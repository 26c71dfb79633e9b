"""The signals that end a process: which are handled, and what a second one means."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from unipar.errors import Terminated

GRACE_PERIOD = 25.0
"""Seconds; a little less than torchrun, Slurm and Kubernetes leave by default."""
TERMINATIONS = (signal.SIGTERM, signal.SIGHUP)

# A scheduler signals every process, and a launcher among them passes the signal on: what comes
# again so soon is the same request.
_REPEAT = 2.0


passed_on: set[int] = set()
"""Signals that came to the process that started the run, which could reach this one rank alone."""


class Request:
    """The first signal that asked this process to stop, and whether another one insists."""

    def __init__(self) -> None:
        self.number = 0
        self._since = 0.0

    def insists(self, number: int) -> bool | None:
        """Note a signal: ``False`` for the first, ``True`` for one that makes it urgent.

        ``None`` is a copy of the first. Ctrl-C has no copies: a terminal sends it once.
        """
        now = time.monotonic()
        if not self.number:
            self.number, self._since = number, now
            return False
        if number != signal.SIGINT and now - self._since < _REPEAT:
            return None
        return True


def takes_over(number: signal.Signals) -> bool:
    """Return whether a signal that stops runs is ours to handle: not the caller's, nor ignored."""
    handler = signal.getsignal(number)
    if number == signal.SIGINT:
        return handler not in (signal.SIG_IGN, None)
    return handler in (signal.SIG_DFL, _end) and not caught_outside_python(number)


@contextlib.contextmanager
def terminations_raised() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into :class:`Terminated`, so that what was begun is cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = {n: signal.signal(n, _end) for n in TERMINATIONS if takes_over(n)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    raise Terminated(number)


def caught_outside_python(number: signal.Signals) -> bool:
    """Return whether there is a handler that ``signal.getsignal`` does not show; seen on Linux."""
    status = Path("/proc/self/status")
    if signal.getsignal(number) is not signal.SIG_DFL or not status.exists():
        return False
    caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
