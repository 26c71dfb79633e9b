"""Run commands, a few at a time, as if they had been run one after the other.

python tests/side_by_side.py --lanes 2 'pytest tests/first' 'pytest tests/second' …

A command starts, in the order given, when a lane is free. What it prints is shown whole when it has
ended. The first to fail ends the others.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import IO, NamedTuple, NoReturn

GRACE = 30.0
"""Seconds that an interrupted command has to clean up."""


class Running(NamedTuple):
    command: str
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    began: float


def start(command: str) -> Running:
    print(f"==> started: {command}", flush=True)
    output = tempfile.TemporaryFile()  # noqa: SIM115 - closed in show()
    process = subprocess.Popen(
        # Replaced by the command, so that a signal for it does not end at the shell.
        ["sh", "-c", f"exec {command}"],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        # Ctrl-C is for this program, which then interrupts each command once.
        start_new_session=True,
    )
    return Running(command, process, output, time.monotonic())


def show(ended: Running, what: str) -> None:
    took = time.monotonic() - ended.began
    print(f"==> {what} after {took:.0f} s: {ended.command}", flush=True)
    with ended.output as output:
        output.seek(0)
        while chunk := output.read(1 << 16):
            sys.stdout.buffer.write(chunk)
    sys.stdout.flush()


def end(running: list[Running]) -> None:
    for one in running:
        one.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + GRACE
    for one in running:
        try:
            one.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()
        show(one, "ended")


def run(commands: list[str], lanes: int) -> int:
    """Run all; the status of the first that fails, or 0."""
    waiting, running = list(commands), []
    try:
        while waiting or running:
            while waiting and len(running) < lanes:
                running.append(start(waiting.pop(0)))
            ended = [one for one in running if one.process.poll() is not None]
            for one in ended:
                running.remove(one)
                status = one.process.returncode
                show(one, f"failed ({status})" if status else "passed")
                if status:
                    return status
            time.sleep(0.2)
    finally:
        end(running)
    return 0


def terminate(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lanes", type=int, default=2, help="how many run at once (default: 2)")
    parser.add_argument("commands", nargs="+", metavar="COMMAND")
    args = parser.parse_args()
    # In the background of a shell SIGINT is ignored, and so it would be by the commands.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, terminate)
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
