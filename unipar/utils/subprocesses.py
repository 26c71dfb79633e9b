"""Ending what a command has started, whichever of the two ends first."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Protocol

_GRACE = 5.0
_PARENT_POLL = 1.0


class Leader(Protocol):
    """A process that leads a session of its own: ``subprocess.Popen``, or what is like it."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float, /) -> int: ...


def end_group(process: Leader, grace: float = _GRACE) -> None:
    """End a process that leads a session of its own, and all that is left of its group.

    Args:
        process: started with ``start_new_session=True``; may have ended already.
        grace: seconds between asking it to end and killing it.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
            if number is signal.SIGTERM and not _group_alive(process.pid):
                return


def end_with(parent: int, last: Callable[[], object] = lambda: None) -> None:
    """End this process and its group when the process that has started it is gone.

    Args:
        parent: its number.
        last: what is still to be done then.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL)
        last()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
