"""The worker processes of one attempt, as the launching process sees and ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import psutil

from unipar.launch.blame import Kind, classify_output
from unipar.launch.failure import Failure, read_failure, read_note
from unipar.launch.rundir import Attempt
from unipar.utils.progress_marks import read_mark
from unipar.utils.signals import TERMINATIONS

_STACK_WAIT = 1.0
_SWEEP_WAIT = 2.0


@dataclass
class WorkerGroup:
    """Processes by rank, the files they write, and when each was first seen to have ended.

    ``timeout`` is how long a collective waits for a rank, in seconds.
    """

    processes: Mapping[int, subprocess.Popen]
    attempt: Attempt
    timeout: float
    stack_signal: signal.Signals
    _ended: dict[int, float] = field(default_factory=dict)
    _to_sweep: set[int] = field(init=False)

    def __post_init__(self) -> None:
        self._to_sweep = {process.pid for process in self.processes.values()}

    @property
    def size(self) -> int:
        return len(self.processes)

    def running(self) -> list[int]:
        return [rank for rank, process in self.processes.items() if process.poll() is None]

    def finished(self) -> list[int]:
        """The ranks whose function has returned."""
        ended = (rank for rank, process in self.processes.items() if process.poll() == 0)
        return [rank for rank in ended if self.attempt.returned(rank).exists()]

    def failures(self) -> list[Failure]:
        """The ranks that have failed until now: by a record of theirs, or by how they exited.

        Once one has failed, so has a rank that others may have failed by: one that left with
        status 0 before its function returned, or that has an error on its way out.
        """
        found: list[Failure] = []
        written = set(os.listdir(self.attempt.directory))
        for rank, process in self.processes.items():
            code = process.poll()
            recorded = self.attempt.record(rank).name in written
            failure = read_failure(self.attempt, rank) if recorded else None
            if failure is None and code:
                failure = self._exit(rank, code)
            if failure is not None:
                found.append(failure)
        if found:
            found += self._unsaid({failure.rank for failure in found})
        return found

    def killed(self, first: int) -> list[int]:
        """The ranks that a signal has ended in the middle of their work, and none that asks to end.

        Args:
            first: the rank that failed first; others that abort do so because of it.
        """
        found = []
        for rank, process in self.processes.items():
            number = -(process.poll() or 0)
            asked = number in (*TERMINATIONS, signal.SIGINT)
            echo = number == signal.SIGABRT and rank != first
            told = self.attempt.record(rank).exists() or self.attempt.returned(rank).exists()
            if number > 0 and not asked and not echo and not told:
                found.append(rank)
        return found

    def _exit(self, rank: int, code: int) -> Failure:
        when = self._ended.setdefault(rank, time.time())
        number = -code if code < 0 else code - 128
        ending = number if number in TERMINATIONS else 0
        kind = Kind.ERROR
        if ending or number == signal.SIGINT:
            kind = Kind.INTERRUPT
        elif code == -signal.SIGABRT and self._gave_up_waiting(rank, when):
            kind = Kind.TIMEOUT
        return Failure(rank, kind, when, _describe_exit(code), signal=ending)

    def _gave_up_waiting(self, rank: int, when: float) -> bool:
        """By what the rank last printed; or, for rank 0 prints to the terminal, by its mark."""
        log = self.attempt.log(rank)
        if log.exists():
            return classify_output(log.read_text(errors="replace")) is Kind.TIMEOUT
        mark = read_mark(self.attempt.mark(rank))
        stood = 0.0 if mark is None else time.monotonic() - mark.time - (time.time() - when)
        return stood >= self.timeout

    def _unsaid(self, failed: set[int]) -> Iterator[Failure]:
        for rank, process in self.processes.items():
            if rank in failed or self.attempt.returned(rank).exists():
                continue
            noted = read_note(self.attempt, rank)
            if noted is not None:
                yield noted
            elif process.poll() == 0:
                yield self._exit(rank, 0)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to every running worker, but not to its children."""
        for rank in self.running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, number)

    def kill(self, ranks: Iterable[int]) -> None:
        """End workers at once, and not what they have started; see :meth:`sweep`."""
        for rank in ranks:
            self.processes[rank].kill()

    def ask_stack(self, rank: int) -> str:
        """Where the worker stands in its Python code, or an empty string if it does not answer."""
        path = self.attempt.stack(rank)
        if not path.exists():
            return ""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.processes[rank].pid, self.stack_signal)
        deadline = time.monotonic() + _STACK_WAIT
        while time.monotonic() < deadline and not path.stat().st_size:
            time.sleep(0.05)
        # The dump is written frame by frame.
        time.sleep(0.05)
        return path.read_text(errors="replace")

    def sweep(self) -> None:
        """End what the workers have left behind, such as a data loader's processes."""
        deadline = time.monotonic() + _SWEEP_WAIT
        while self._to_sweep and time.monotonic() < deadline:
            # A group that is gone is never looked for again: its number may come to be another's.
            self._to_sweep = {group for group in self._to_sweep if _kill_group(group)}
            time.sleep(0.02 if self._to_sweep else 0)


def _kill_group(group: int) -> bool:
    """Kill a process group; whether it still had members that run."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return False
    # Of those that have ended the group is not rid until somebody collects them, and the first
    # process of a container may not.
    return any(map(_runs, _members(group)))


def _members(group: int) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(process.pid) == group:
                yield process


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"exited with status {code} without a Python error"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    if -code == signal.SIGKILL:
        return f"was killed by {name}, as the system does when memory runs out"
    return f"was killed by {name}"
