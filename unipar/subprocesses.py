"""Ending what a command has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Any

_GRACE = 5.0


def end_group(process: subprocess.Popen[Any], grace: float = _GRACE) -> None:
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


def _group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
