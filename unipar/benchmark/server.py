"""A process that has imported what every trial needs, and forks the processes of each.

To import torch takes longer than most trials. Processes are not used twice all the same: what a
trial leaves in memory, and what a framework changes when it is imported, would be in the next. So
frameworks are imported by the ranks themselves.

``python -m unipar.benchmark DESCRIPTOR`` receives over a socket what to run.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

_POLL = 0.02
_MESSAGE = 1 << 16


class Server:
    """One interpreter that is ready to run trials, as the benchmark sees it.

    Args:
        python: the interpreter.
    """

    def __init__(self, python: str) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # What a killed process has printed is to be read.
                [python, "-u", "-m", "unipar.benchmark", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(
        self, job: Path, directory: Path, *, processes: int, threads: int, log: int
    ) -> Forked:
        """Run the trial that ``directory`` describes.

        Args:
            job: the job of all trials.
            directory: of this one.
            processes: the ranks that it has.
            threads: that each of them has.
            log: the descriptor that its output goes to.

        Raises:
            RuntimeError: the interpreter has ended, and what it said.
        """
        request = {
            "job": str(job),
            "directory": str(directory),
            "processes": processes,
            "threads": threads,
        }
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [log])
            pid = _number(self._socket)
        except OSError:
            pid = None
        if pid is None:
            _, said = self._process.communicate()
            raise RuntimeError(said.decode(errors="replace"))
        return Forked(pid, self._socket)

    def close(self) -> None:
        """End it; a trial that is still running ends, too."""
        self._socket.close()
        self._process.communicate()


class Forked:
    """A forked process, with as much of ``subprocess.Popen`` as ends it.

    Attributes:
        pid: its number, and that of its session.
    """

    def __init__(self, pid: int, answers: socket.socket) -> None:
        self.pid = pid
        self._answers = answers
        self._code: int | None = None

    def wait(self, timeout: float) -> int:
        """Its exit code, or the signal that killed it, below 0.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self._code is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(["trial"], timeout)
            code = _number(self._answers)
            self._code = -signal.SIGKILL if code is None else code
        return self._code


def serve(answers: socket.socket) -> None:
    """Fork a process for each request, one after the other, until the other end is closed."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(answers, _MESSAGE, 1)
        if not message:
            return
        (log,) = descriptors
        pid = os.fork()
        if pid == 0:
            answers.close()
            _become(json.loads(message), log)
        os.close(log)
        _send(answers, pid)
        status = _wait(pid, answers)
        if status is None:
            return
        _send(answers, os.waitstatus_to_exitcode(status))


def _become(request: dict[str, object], log: int) -> NoReturn:
    """Be the process of a trial."""
    import torch

    from unipar.benchmark.trial import main
    from unipar.launch.forked import workers_ahead

    os.setsid()
    prepare = functools.partial(_hold_the_files_of, os.getppid())
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    processes, threads = request["processes"], request["threads"]
    assert isinstance(processes, int)
    assert isinstance(threads, int)
    # For its own children; what torch has read before it was forked must be told it again.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    with contextlib.ExitStack() as stack:
        if processes > 1:
            # Before it holds anything of the job: what it holds, they hold.
            stack.enter_context(workers_ahead(processes, prepare))
        else:
            prepare()
        code = main(Path(str(request["job"])), Path(str(request["directory"])))
    sys.exit(code)


def _hold_the_files_of(parent: int) -> None:
    """Have the same pages of libraries in memory as the process that this one was forked from.

    A forked process has none of them until it reads them, so its memory would be less than that
    of one that has imported torch by itself, as in every other run.
    """
    maps = Path(f"/proc/{parent}/maps")
    if not maps.exists():
        return
    page = os.sysconf("SC_PAGE_SIZE")
    with open(f"/proc/{parent}/pagemap", "rb", buffering=0) as pages:
        for line in maps.read_text().splitlines():
            span, rights, _, _, node, *_ = line.split()
            if node == "0" or not rights.startswith("r"):
                continue
            begin, end = (int(number, 16) for number in span.split("-"))
            read = os.pread(pages.fileno(), 8 * (end - begin) // page, 8 * begin // page)
            entries = array.array("Q", read)
            for place, entry in enumerate(entries):
                if entry >> 63:  # It is in the parent's memory.
                    ctypes.string_at(begin + place * page, 1)


def _wait(pid: int, answers: socket.socket) -> int | None:
    """The status of a child; ``None`` where the other end is gone, and so the child is ended."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        if select.select([answers], [], [], _POLL)[0]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None


def _send(answers: socket.socket, number: int) -> None:
    answers.sendall(array.array("q", [number]).tobytes())


def _number(answers: socket.socket) -> int | None:
    """Read what :func:`_send` has sent; ``None`` where the other end is gone."""
    data = answers.recv(array.array("q").itemsize, socket.MSG_WAITALL)
    return array.array("q", data)[0] if data else None
