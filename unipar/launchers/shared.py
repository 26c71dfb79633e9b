"""Processes that another program starts, and a directory that all their machines share.

What they run is written there; what they return, how they fail and what ranks other than 0 print
is read there. Each is started as ``python …/unipar/launch/worker.py DIRECTORY`` with whatever
variables its system sets, by which it is found where it stands.
"""

from __future__ import annotations

import codecs
import os
import signal
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from unipar.errors import Terminated, WorkerError
from unipar.launch import report
from unipar.launch.blame import Kind
from unipar.launch.failure import Failure, cause, read_failure, read_note
from unipar.launch.local import read_result, write_payload, write_start_elsewhere
from unipar.launch.rank_names import name_ranks
from unipar.launch.rundir import Attempt, RunDir, fresh
from unipar.launch.worker import WORKER
from unipar.launchers.handle import Handle
from unipar.launchers.task import Task
from unipar.utils.replacing import replacing

LAST_LINES = 15
"""Of what a system or its command has printed, for an error."""


class SharedRun:
    """One start of a task by way of a directory.

    Args:
        task: what is run. It is written to its directory here.
        python: the interpreter on the machines where it runs, by default the path of this one.
        environ: variables that its processes get, where they have none of the name.

    Raises:
        ConfigError: the function cannot travel.
    """

    def __init__(
        self,
        task: Task,
        *,
        python: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.task = task
        self.files = RunDir(task.directory)
        self.command = [python or sys.executable, "-u", str(WORKER), str(task.directory)]
        """What starts one process of the run."""
        self.restarted(task.restart)
        if not self.files.payload.exists():
            write_payload(task.fn, self.files)
        self.asked_to_end = False
        """Whether a signal was passed on that ends the run."""
        self.files.request.unlink(missing_ok=True)
        write_start_elsewhere(
            self.files,
            device_type=task.device_type,
            timeout=task.timeout,
            save_signal=task.save_signal,
            restart=task.restart,
            environ=environ or {},
        )

    @property
    def size(self) -> int:
        return self.task.size

    def restarted(self, restart: int) -> None:
        """Look from now on at what the processes of this start leave, the first of which is 0."""
        self.restart = restart
        self.attempt: Attempt = self.files.attempt(restart)
        self.attempt.directory.mkdir(exist_ok=True)
        self.output = Tail(self.attempt.log(0))
        """What rank 0 prints."""

    def interrupt(self, number: signal.Signals) -> None:
        """Ask rank 0 to send itself a signal; the ranks agree on it in their next step."""
        self.asked_to_end |= number != self.task.save_signal
        with replacing(self.files.request) as partial:
            partial.write_text(str(number.value))

    def finished(self) -> list[int]:
        """The ranks whose function has returned."""
        return [rank for rank in range(self.size) if self.attempt.returned(rank).exists()]

    def has_failed(self) -> bool:
        """Whether a rank of this start has left word of how it failed."""
        fresh(self.attempt.directory)
        names = set(os.listdir(self.attempt.directory))
        return any(self.attempt.record(rank).name in names for rank in range(self.size))

    def result(self, ending: str, ranks: Collection[int] = ()) -> Any:
        """What rank 0's call has returned, or what failed.

        Args:
            ending: how it ended, as its system says it, with its last words.
            ranks: whose end that is; left out: of all of them.

        Raises:
            UniparError, WorkerError, KeyboardInterrupt, Terminated: as a rank has failed.
        """
        failures = self._failures()
        heard = {failure.rank for failure in failures} | set(self.finished())
        silent = [rank for rank in range(self.size) if rank not in heard]
        ended = [rank for rank in silent if rank in ranks]
        silent = ended or silent
        first = cause(failures) if failures else None
        # A rank may have found out by the run's store whom it waited for.
        explained = [failure for failure in failures if isinstance(failure.error, WorkerError)]
        if explained and not ended and all(failure.kind.is_echo for failure in failures):
            first = cause(explained)
            silent = []
        # Systems end what is left by a signal when one process is gone.
        if silent and not self.asked_to_end and (first is None or first.kind is not Kind.ERROR):
            # Of one that exits as if all were well, systems say nothing, but of those that miss it.
            link = ". Of others is known: " if ranks and not ended else ": "
            told = f"{name_ranks(silent).capitalize()} of {self.size} ended without a word"
            lines = [f"{told}{link}{ending}"]
            for rank in silent:
                lines += report.log_tail(self, rank)
            raise WorkerError("\n".join(lines), rank=silent[0])
        if first is None:
            if silent:
                raise KeyboardInterrupt
            return read_result(self.files)
        if first.signal:
            raise Terminated(first.signal)
        if first.kind is Kind.INTERRUPT:
            raise KeyboardInterrupt
        raise first.error or report.failed(self, first)

    def _failures(self) -> list[Failure]:
        found = []
        fresh(self.attempt.directory)
        for rank in range(self.size):
            if self.attempt.returned(rank).exists():
                # What it has noted on its way it has dealt with.
                continue
            failure = read_failure(self.attempt, rank) or read_note(self.attempt, rank)
            if failure is not None:
                found.append(failure)
        return found


class SharedHandle(Handle):
    """A handle of processes that are told, and tell, by way of a run's directory."""

    _run: SharedRun

    def output(self) -> str:
        return self._run.output.read()

    def interrupt(self, number: signal.Signals) -> None:
        self._run.interrupt(number)


class Tail:
    """The growing text of a file that may not be there yet."""

    def __init__(self, path: Path) -> None:
        self.path, self._place = path, 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self) -> str:
        """What was added since the last call."""
        fresh(self.path.parent)
        try:
            with self.path.open("rb") as file:
                file.seek(self._place)
                data = file.read()
        except FileNotFoundError:
            return ""
        self._place += len(data)
        # A character may be written in two parts.
        return self._decoder.decode(data)
