"""Run commands, a few at a time, as if they had been run one after the other.

python tests/side_by_side.py --lanes 2 'first=pytest tests/first' 'second=pytest tests/second' …

A command starts, in the order given, when a lane is free. What it prints is shown whole when it has
ended. The first to fail ends the others. At the end a table says what each has taken; there a
command goes by the name before its "=", if it has one.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO

import psutil

GRACE = 30.0
"""Seconds that an interrupted command has to clean up."""
LEFT = 3.0
"""Seconds that what it has left running has to end by itself."""
POLL = 0.1
# Linux, include/uapi/linux/prctl.h.
_PR_SET_CHILD_SUBREAPER = 36


class Suite:
    """A command that runs, or has run.

    Attributes:
        status: its exit code, once it has ended.
        took: seconds from its start to its end.
        cpu: seconds of processor time of it and of all that came of it.
    """

    def __init__(self, command: str) -> None:
        name, self.command = _parse(command)
        self.name = name or self.command
        self.status: int | None = None
        self.took = self.cpu = 0.0
        print(f"==> started: {self.command}", flush=True)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in show()
        self._began = time.monotonic()
        self._pid = os.fork()
        if self._pid == 0:
            status = 1
            try:
                status = run_and_reap(self.command, self._output)
            finally:
                os._exit(status)

    def ended(self) -> bool:
        if self.status is None:
            pid, status, used = os.wait4(self._pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
                self.took = time.monotonic() - self._began
                self.cpu = used.ru_utime + used.ru_stime
        return self.status is not None

    def interrupt(self) -> None:
        if self.status is None:
            os.kill(self._pid, signal.SIGINT)

    def kill(self) -> None:
        os.killpg(self._pid, signal.SIGKILL)
        while not self.ended():
            time.sleep(POLL)

    def show(self, what: str) -> None:
        print(f"==> {what} after {self.took:.0f} s: {self.command}", flush=True)
        with self._output as output:
            output.seek(0)
            while chunk := output.read(1 << 16):
                sys.stdout.buffer.write(chunk)
        sys.stdout.flush()


def run_and_reap(command: str, output: IO[bytes]) -> int:
    """Run a command in a session of its own; its exit code, once nothing is left of it.

    What it has started and not waited for (the process that the ranks of a pool are forked from)
    comes to this process, which waits for it: only then is its processor time known.
    """
    # Ctrl-C is for this program, which then interrupts each command once.
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    # Replaced by the command, so that a signal for it does not end at the shell.
    process = subprocess.Popen(
        ["sh", "-c", f"exec {command}"],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    status, deadline = 1, math.inf
    while True:
        try:
            pid, how = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == process.pid:
            # As a shell tells of a signal.
            code = process.returncode = os.waitstatus_to_exitcode(how)
            status, deadline = code if code >= 0 else 128 - code, time.monotonic() + LEFT
        elif pid == 0:
            if _interrupts and process.returncode is None:
                os.kill(process.pid, _interrupts.pop())
            if time.monotonic() > deadline:
                _end_what_is_left(output)
            time.sleep(POLL)


def _end_what_is_left(output: IO[bytes]) -> None:
    for left in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            output.write(f"==> left running, and ended: {shlex.join(left.cmdline())}\n".encode())
            left.kill()
    output.flush()


def _parse(command: str) -> tuple[str, str]:
    named = re.match(r"([\w-]+)=(.*)", command, re.DOTALL)
    return (named[1], named[2]) if named else ("", command)


def end(running: list[Suite]) -> None:
    for suite in running:
        suite.interrupt()
    deadline = time.monotonic() + GRACE
    for suite in running:
        while not suite.ended() and time.monotonic() < deadline:
            time.sleep(POLL)
        if not suite.ended():
            suite.kill()
        suite.show("ended")


def run(commands: list[str], lanes: int) -> int:
    """Run all; the status of the first that fails, or 0."""
    waiting, running = list(commands), []
    suites: list[Suite] = []
    try:
        while waiting or running:
            if _interrupts:
                raise KeyboardInterrupt
            while waiting and len(running) < lanes:
                suites.append(Suite(waiting.pop(0)))
                running.append(suites[-1])
            for suite in [one for one in running if one.ended()]:
                running.remove(suite)
                suite.show(f"failed ({suite.status})" if suite.status else "passed")
                if suite.status:
                    return suite.status
            time.sleep(POLL)
    finally:
        end(running)
        print_times(suites)
    return 0


def print_times(suites: list[Suite]) -> None:
    print("==>   seconds  of processor time")
    for suite in suites:
        print(f"==> {suite.took:9.0f} {suite.cpu:9.0f}  {suite.name}")
    total = sum(suite.cpu for suite in suites)
    print(f"==> {'':9} {total:9.0f}  in all")


_interrupts: list[int] = []


def note(number: int, _: object) -> None:
    # Not raised at once: a command that is just being started would be left to itself.
    _interrupts.append(number)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lanes", type=int, default=2, help="how many run at once (default: 2)")
    parser.add_argument("commands", nargs="+", metavar="COMMAND")
    args = parser.parse_args()
    # In the background of a shell SIGINT is ignored, and so it would be by the commands.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    if hasattr(os, "SCHED_BATCH"):
        # A process that wakes up, as ranks do all the time, waits until another one's turn is over:
        # with fewer changes from one to the other the same is done in a tenth less time.
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    began = time.monotonic()
    try:
        status = run(args.commands, args.lanes)
    except KeyboardInterrupt:
        sys.exit(130)
    if status:
        sys.exit(1)
    print(f"==> all passed, in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
