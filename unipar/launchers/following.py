"""Following what was started until it ends, and passing on what the user asks of it meanwhile."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator

from unipar.errors import Terminated, WorkerError
from unipar.launchers.handle import Handle
from unipar.launchers.task import Task
from unipar.utils.signals import TERMINATIONS, Request, takes_over

log = logging.getLogger("unipar")

# After Ctrl-C, until all ranks have ended; and what any of them needs beyond the grace period.
_INTERRUPT_GRACE, _GRACE_MARGIN = 600.0, 10.0


def follow(handle: Handle, task: Task) -> None:
    """Show what rank 0 prints, until all has ended.

    Raises:
        KeyboardInterrupt: the user interrupted it; or, where it goes on without this process, did
            not want to wait for it.
        Terminated: the same for SIGTERM and SIGHUP.
        UniparError: what was asked to end could not save, or the like.
    """
    request, deadline = Request(), float("inf")
    with _noted(task.save_signal) as came:
        while True:
            # In this order: what is printed last is there when it has ended.
            ended = handle.status().ended
            print(handle.output(), end="", flush=True)
            if ended:
                break
            while came:
                number = came.pop(0)
                if number == task.save_signal:
                    handle.interrupt(number)
                elif (insists := request.insists(number)) is False:
                    deadline = time.monotonic() + _first(handle, task, number)
                elif insists:
                    deadline = 0.0
            if time.monotonic() > deadline:
                handle.cancel()
                deadline = float("inf")
            time.sleep(handle.poll)
    if not request.number:
        return
    # These come of asking it to end.
    with contextlib.suppress(WorkerError, KeyboardInterrupt, Terminated):
        handle.result()
    _stop(request.number)


def _first(handle: Handle, task: Task, number: signal.Signals) -> float:
    """Do what the first signal asks for; seconds until what was started is ended by force."""
    if handle.outlives:
        if number == signal.SIGINT and _asked(f"Cancel {handle.name}? [y/N] "):
            handle.cancel()
        else:
            log.warning("%s goes on without this process.", handle.name)
        _stop(number)
    handle.interrupt(number)
    grace = _INTERRUPT_GRACE if number == signal.SIGINT else task.grace_period
    return grace + _GRACE_MARGIN


def _stop(number: int) -> None:
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(number)


def _asked(question: str) -> bool:
    """The user's answer; where nobody can be asked, no."""
    if not (sys.stdin and sys.stdin.isatty()):
        return False
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        return input(f"\n{question}").strip().lower() in ("y", "yes")
    return False


@contextlib.contextmanager
def _noted(save_signal: signal.Signals | None) -> Iterator[list[signal.Signals]]:
    """The signals that have come since, for the length of the block."""
    came: list[signal.Signals] = []
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    noted = [number for number in (signal.SIGINT, *TERMINATIONS) if takes_over(number)]
    if save_signal is not None and signal.getsignal(save_signal) is signal.SIG_DFL:
        noted.append(save_signal)
    before = {
        number: signal.signal(number, lambda number, _: came.append(signal.Signals(number)))
        for number in noted
    }
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
