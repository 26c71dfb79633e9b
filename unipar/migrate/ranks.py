"""``python ranks.py N SCRIPT ARGUMENT…``: a script in N processes, with the variables of torchrun.

torchrun itself imports torch before it starts anything, which takes longer than most scripts take
for the few steps of a proof. Only the standard library is imported here, for the same reason.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time

_POLL = 0.02
_REST = 5.0
"""Seconds that the other ranks have to end by themselves once one has failed."""


def main(arguments: list[str]) -> int:
    size = int(arguments[0])
    together = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": str(os.getpid()),
    }
    processes = []
    try:
        for rank in range(size):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONUNBUFFERED": "1"}
            command = [sys.executable, *arguments[1:]]
            processes.append(subprocess.Popen(command, env={**os.environ, **together, **own}))
        return _wait(processes)
    finally:
        for process in processes:
            process.kill()


def _wait(processes: list[subprocess.Popen[bytes]]) -> int:
    """The first exit code that is not 0; the other ranks would wait for that rank forever."""
    failed, deadline = 0, float("inf")
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if not failed and (failed := next(filter(None, codes), 0)):
            deadline = time.monotonic() + _REST
        if None not in codes:
            break
        time.sleep(_POLL)
    return 128 - failed if failed < 0 else failed


def _free_port() -> int:
    """A port that nobody listens on, below those that systems give to outgoing connections."""
    while True:
        port = random.randrange(15000, 30000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
