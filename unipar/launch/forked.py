"""Worker processes that are forked before a run starts them, for many short runs in a row.

A new interpreter imports torch first, and then takes longer to start than a short run takes. A
process that has imported it, and has done nothing else, forks the workers of its run ahead; torch's
agent then tells them what it would tell a new interpreter, and sees them as it would see that one:
they are children of the agent's process, lead sessions of their own and end by themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

_MESSAGE = 1 << 16
_POLL = 0.02


class ForkedWorker(subprocess.Popen):
    """A forked process that waits until it is made a worker, which happens once.

    Of ``Popen`` it keeps what ends a process; it starts none, and has no streams.

    Args:
        prepare: called in the new process before it waits.
    """

    def __init__(self, prepare: Callable[[], object]) -> None:
        self.args, self.returncode = [], None
        self._orders, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            self._orders.close()
            _await_orders(theirs, prepare)
        theirs.close()

    def begin(self, argv: list[str], variables: dict[str, str], streams: list[int]) -> None:
        """Let it be a worker.

        Args:
            argv: the worker's file, and the run's directory.
            variables: its environment, all of it.
            streams: descriptors that become its stdout and stderr.
        """
        # One that has been killed meanwhile is found by its exit code.
        with self._orders, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            # It leads a session from then on: its group may be killed.
            self._orders.recv(1)
            order = json.dumps({"argv": argv, "variables": variables}).encode()
            sent = socket.send_fds(self._orders, [order], streams)
            self._orders.sendall(order[sent:])

    def abandon(self) -> None:
        """Let it end, for there is nothing to do."""
        self._orders.close()
        self.wait()

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(["worker"], timeout or 0.0)
            time.sleep(_POLL)
        return code


_waiting: list[ForkedWorker] = []


@contextlib.contextmanager
def workers_ahead(number: int, prepare: Callable[[], object]) -> Iterator[None]:
    """Fork ``number`` workers for the first run that is started within the block.

    Whatever this process holds, they hold too, and what runs in its other threads does not go on
    in them: so do it first of all, in a process with one thread that has not used a GPU.

    Args:
        number: what the run will take; one that takes more starts the rest as new interpreters.
        prepare: called in each of them while it waits.
    """
    for _ in range(number):
        _waiting.append(ForkedWorker(prepare))
    try:
        yield
    finally:
        while _waiting:
            _waiting.pop().abandon()


@contextlib.contextmanager
def taken() -> Iterator[None]:
    """Within the block, torch's agent takes workers that wait before it starts new ones."""
    # torch 2.13, torch/distributed/elastic/multiprocessing/api.py: SubprocessContext._start makes
    # all handlers by this name, and has no other place that says how a process is started.
    agents: Any = api
    before = agents.get_subprocess_handler

    def handler(**given: Any) -> SubprocessHandler:
        return _Handler(**given) if _waiting else before(**given)

    agents.get_subprocess_handler = handler
    try:
        yield
    finally:
        agents.get_subprocess_handler = before


class _Handler(SubprocessHandler):
    def _popen(self, args: tuple, env: dict[str, str]) -> subprocess.Popen:
        streams = [
            file.fileno() if file else own for file, own in ((self._stdout, 1), (self._stderr, 2))
        ]
        worker = _waiting.pop(0)
        worker.begin([str(one) for one in args[-2:]], env, streams)
        return worker


def _await_orders(orders: socket.socket, prepare: Callable[[], object]) -> NoReturn:
    """Be a worker once told to; end if the process that was to tell is gone."""
    os.setsid()
    # That end must be the launching process's alone, so that it is closed when that one ends.
    for sibling in _waiting:
        sibling._orders.close()
    _waiting.clear()
    prepare()
    message, streams = b"", []
    # The launching process may be gone by now, or have nothing to do.
    with orders, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        orders.sendall(b"\0")
        message, streams, _, _ = socket.recv_fds(orders, _MESSAGE, 2)
        while more := orders.recv(_MESSAGE):
            message += more
    if not message:
        os._exit(0)
    order = json.loads(message)
    for place, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, place)
        os.close(stream)
    os.environ.clear()
    os.environ.update(order["variables"])
    sys.argv[:] = order["argv"]

    from unipar.launch.worker import main

    main()
    sys.exit()
