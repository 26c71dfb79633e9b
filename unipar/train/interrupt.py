"""Signals that stop a run, or make it save: the step is finished and saved first."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from unipar.errors import Terminated
from unipar.utils.signals import (
    GRACE_PERIOD,
    TERMINATIONS,
    Request,
    caught_outside_python,
    takes_over,
)
from unipar.world import Flag, World

log = logging.getLogger("unipar")

# For an exception to leave the main thread, which may be stuck in a call that is not Python's.
_UNWIND = 5.0
# Read where numbers of signals are, of which this is none.
_NO_MORE = b"\0"


class Signals:
    """The requests of signals to the run in this process; inert outside the main thread.

    SIGINT, SIGTERM and SIGHUP stop the run: at once before its first step, later when the step
    is done. The second one stops it at once. Left alone is what the process ignores (``nohup``),
    and SIGTERM and SIGHUP where the caller has a handler of his own.

    Args:
        grace_period: seconds between SIGTERM or SIGHUP and the end of the process.
        save_signal: what makes the run save and go on; a handler of the caller's own is called
            after the save.

    Attributes:
        newest: the newest complete checkpoint.
    """

    def __init__(
        self, *, grace_period: float = GRACE_PERIOD, save_signal: signal.Signals | None = None
    ) -> None:
        self.newest: Path | None = None
        self._grace, self._save_signal = grace_period, save_signal
        self._request = Request()
        self._saves: list[int] = []
        self._joined: World | None = None
        self._world: World | None = None
        self._before: dict[int, Any] = {}

    @property
    def stopped_by(self) -> int:
        """The signal that asked this process to stop; 0 if none has."""
        return self._request.number

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Install the handlers for the length of the block."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        for number in (signal.SIGINT, *TERMINATIONS):
            if takes_over(number):
                self._before[number] = signal.signal(number, self._on_stop)
        if self._save_signal is not None and self._takes_over_save(self._save_signal):
            self._before[self._save_signal] = signal.signal(self._save_signal, self._on_save)
        with _forgotten_in_children(self), self._watched():
            try:
                yield
            finally:
                self.restore()

    @contextlib.contextmanager
    def training(self, world: World) -> Iterator[None]:
        """Let steps be finished before the run stops, from the first :meth:`begin_step` on.

        A signal that came too late for a step to see it takes effect at the end of the block.
        """
        self._joined = world
        try:
            yield
        finally:
            self._joined = self._world = None
        self.pass_on()
        if self.stopped_by:
            self._leave(self.stopped_by)

    def begin_step(self) -> None:
        """Note that there is something to finish from now on.

        Raises:
            KeyboardInterrupt, Terminated: a signal came before the first step, and what it raised
                then was caught on its way out, by whatever code it came upon.
        """
        if self._world is None and self.stopped_by:
            self._leave(self.stopped_by)
        self._world = self._joined

    def pass_on(self) -> None:
        """Call the caller's own handler of the save signal, where he has one and it came."""
        while self._saves:
            number = self._saves.pop()
            if callable(handler := self._before[number]):
                handler(number, None)

    def restore(self) -> None:
        """Put the caller's handlers back."""
        while self._before:
            signal.signal(*self._before.popitem())

    # -- in the main thread ----------------------------------------------------------------------

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        insists = self._request.insists(number)
        if insists is None:
            return
        if self._world is not None and not insists:
            self._world.raise_flag(Flag.INTERRUPT)
        else:
            self._leave(number)

    def _leave(self, number: int) -> None:
        if number != signal.SIGINT:
            raise Terminated(number)
        # It does what it would have done.
        signal.signal(number, self._before.pop(number, signal.getsignal(number)))
        signal.raise_signal(number)

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self._saves.append(number)
        if self._world is not None:
            self._world.raise_flag(Flag.SAVE)

    def _takes_over_save(self, number: signal.Signals) -> bool:
        if caught_outside_python(number):
            log.warning(
                "%s has a handler that Python does not know of (faulthandler's, or a library's), "
                "and is left alone: it will not make this run save. Choose another save_signal.",
                number.name,
            )
            return False
        return signal.getsignal(number) not in (signal.SIG_IGN, None)

    # -- beside the main thread ------------------------------------------------------------------

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """End the process when its time is up, whatever the main thread is stuck in.

        Python calls a signal's handler only when the main thread comes back to it, and a
        collective that waits for another rank does not.
        """
        ours, theirs = os.pipe()
        os.set_blocking(theirs, False)
        before = signal.set_wakeup_fd(theirs, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._watch, args=(ours,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            # Closing it would not do: a forked process may hold it open.
            os.write(theirs, _NO_MORE)
            thread.join()
            os.close(theirs)
            os.close(ours)

    def _watch(self, wakeups: int) -> None:
        request, deadline = Request(), float("inf")
        while True:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([wakeups], [], [], min(max(left, 0.0), 3600.0))
            if not ready and left <= 0:
                self._end(request.number)
            numbers = os.read(wakeups, 256) if ready else b""
            if _NO_MORE in numbers:
                return
            for number in numbers:
                # Ctrl-C has no deadline but the user's patience.
                if number in TERMINATIONS and number in self._before:
                    insists = request.insists(number)
                    patience = self._grace if self._world is not None else _UNWIND
                    if insists is not None:
                        deadline = time.monotonic() + (_UNWIND if insists else patience)

    def _end(self, number: int) -> NoReturn:
        if self._world is not None:
            kept = f"Nothing newer than {self.newest} was" if self.newest else "Nothing was"
            log.warning(
                "%s: rank %d did not come to the end of its step and save within "
                "grace_period=%g s. %s saved.",
                signal.Signals(number).name,
                self._world.rank,
                self._grace,
                kept,
            )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + number)


_active: list[Signals] = []


@contextlib.contextmanager
def _forgotten_in_children(signals: Signals) -> Iterator[None]:
    """Keep forked processes, such as a data loader's, from reporting their signals as ours."""
    _active.append(signals)
    try:
        yield
    finally:
        _active.remove(signals)


def _after_fork() -> None:
    if _active:
        signal.set_wakeup_fd(-1)
    while _active:
        _active.pop().restore()


os.register_at_fork(after_in_child=_after_fork)
