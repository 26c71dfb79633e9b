"""Processes that are started once and run many distributed tests, each in a fresh world.

Starting Python and importing torch takes seconds on each rank, and a test milliseconds. A pool
pays for the start once::

    losses = world_pool(2).run(train, model)  # train(placement, model) on both ranks
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import queue
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from unipar.testing.worker import Outcome, Task, work
from unipar.utils.environ import environ
from unipar.utils.scratch import scratch
from unipar.world import Placement

# One process imports torch for all workers of all pools, and they are forked from it.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["unipar.testing.preload"])

GRACE = 5.0
"""Seconds that the other ranks have to end once one has failed."""

# What faulthandler prints above a stack, and above all of them where a process crashes.
_STACK = "(most recent call first)"
_CRASH = b"Fatal Python error: "
# A rank whose peer has left says this; the peer's own error is the one to show.
_COLLATERAL = re.compile(r"Connection (closed|reset)|Broken pipe|Timed out waiting|heartbeat", re.I)


class TaskFailed(RuntimeError):
    """A task did not come to an end: a rank died, or the time ran out."""


class RemoteTraceback(Exception):
    """The traceback of an exception, as text, from the process that raised it."""


class WorkerPool:
    """``size`` processes that run functions as the ranks of a world.

    The processes start at the first :meth:`run`, end with :meth:`close` or when this process does,
    however it does, and are replaced after a task that did not end. They import the main module
    again, so a script that makes a pool does so under ``if __name__ == "__main__"``.

    Args:
        size: number of ranks.
        device_type: what :class:`~unipar.world.Placement` says to each task. The only GPU of a
            machine is shared by all ranks, which then exchange their values by way of the host.
    """

    def __init__(self, size: int, *, device_type: str = "cpu") -> None:
        self.size, self.device_type = size, device_type
        self._workers: list[_Worker] = []
        self._replies: queue.SimpleQueue[tuple[int, Outcome | None]] = queue.SimpleQueue()
        atexit.register(self.close)

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call ``fn(placement, *args)`` on every rank, and return the results by rank.

        ``placement.init_method`` is good for one process group, which :func:`unipar.world.join`
        makes; a group that the function leaves behind is destroyed.

        Args:
            fn: any function; cloudpickle carries it.
            args: what else it is called with, the same on each rank.
            timeout: seconds after which the pool is killed.

        Raises:
            TaskFailed: a rank died, or the time ran out; says where each rank was.
            Exception: what the first failing rank raised, its own traceback being the cause.
        """
        payload = cloudpickle.dumps((fn, args))
        self._start()
        with scratch() as directory:
            try:
                return self._run(fn, payload, directory, timeout)
            except BaseException:
                # Also on Ctrl-C: ranks in the middle of a task cannot be used again.
                if any(worker.busy for worker in self._workers):
                    self._kill()
                raise

    def _run(self, fn: Callable[..., Any], payload: bytes, directory: Path, limit: float) -> list:
        meeting = f"file://{directory}/store" if self.size > 1 else None
        for rank, worker in enumerate(self._workers):
            placement = Placement(
                rank=rank,
                size=self.size,
                local_rank=rank,
                local_size=self.size,
                init_method=meeting,
                timeout=limit,
                device_type=self.device_type,
            )
            worker.send(Task(payload, placement, sys.path))
        outcomes: dict[int, Outcome] = {}
        deadline = time.monotonic() + limit
        name = getattr(fn, "__qualname__", repr(fn))
        while len(outcomes) < self.size:
            try:
                rank, outcome = self._replies.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                if any(outcome.traceback for outcome in outcomes.values()):
                    break
                raise TaskFailed(self._describe_hang(name, outcomes, limit)) from None
            worker = self._workers[rank]
            if outcome is None:
                worker.process.join()
                code, output = worker.process.exitcode, worker.output()
                raise TaskFailed(f"{name}: rank {rank} died (exit code {code})\n{output}")
            worker.busy = False
            outcomes[rank] = outcome
            if outcome.traceback:
                deadline = min(deadline, time.monotonic() + GRACE)
        failed = {rank: outcome for rank, outcome in outcomes.items() if outcome.traceback}
        if failed:
            own = [rank for rank in failed if not _COLLATERAL.search(failed[rank].traceback)]
            rank = (own or list(failed))[0]
            error = pickle.loads(failed[rank].payload)
            raise error from RemoteTraceback(f"\nrank {rank}:\n{failed[rank].traceback}")
        return [pickle.loads(outcomes[rank].payload) for rank in range(self.size)]

    def _describe_hang(self, name: str, outcomes: dict[int, Outcome], limit: float) -> str:
        for worker in self._workers:
            if worker.busy:
                worker.ask_stack()
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and not all(
            _STACK in worker.output() for worker in self._workers if worker.busy
        ):
            time.sleep(0.05)
        waiting = [rank for rank, worker in enumerate(self._workers) if worker.busy]
        lines = [f"{name} did not end within {limit:g} s on ranks {waiting} of {self.size}"]
        for rank in waiting:
            worker = self._workers[rank]
            lines.append(f"rank {rank}{worker.waits_in()}:\n{worker.output()}")
        return "\n".join(lines)

    def _start(self) -> None:
        if not self._workers:
            self._replies = queue.SimpleQueue()
            sharing = self.device_type == "cuda" and 1 == torch.cuda.device_count() < self.size
            self._workers = [
                _Worker(rank, self._replies, sharing=sharing) for rank in range(self.size)
            ]

    def _kill(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.end()

    def close(self) -> None:
        """End the processes. The pool can be used again."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.end()


class _Worker:
    """One process: what it is asked, what it answers, and what it prints."""

    def __init__(self, rank: int, replies: queue.SimpleQueue, *, sharing: bool) -> None:
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end()
        self._mark = 0
        self.busy = False
        self._tasks, tasks = _FORKS.Pipe()
        # A Connection is what carries a descriptor, and this one is only written to by its number.
        printed = Connection(os.dup(self._printed.fileno()), readable=False)
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path(sys.path)}
        if sharing:
            # NCCL takes one rank of a GPU, unless it believes that they are on several hosts. It
            # does not use the loopback interface unless it is named.
            variables |= {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
        if sys.platform == "linux":
            # Otherwise gloo looks up the host's name, and waits where name service is slow.
            variables["GLOO_SOCKET_IFNAME"] = "lo"
        # Also for the process that all are forked from, which the first worker starts.
        with environ(variables):
            self.process = _FORKS.Process(target=work, args=(tasks, printed, dict(os.environ)))
            self.process.start()
        tasks.close()
        printed.close()
        threading.Thread(target=_forward, args=(self._tasks, rank, replies), daemon=True).start()

    def send(self, task: Task) -> None:
        self._mark = os.fstat(self._printed.fileno()).st_size
        self.busy = True
        # A worker that has died since the last task is noticed when its reply is awaited.
        with suppress(BrokenPipeError):
            self._tasks.send_bytes(pickle.dumps(task))

    def output(self, limit: int = 4000) -> str:
        """What the process has printed since the task began: its end, or how it crashed."""
        size = os.fstat(self._printed.fileno()).st_size
        text = os.pread(self._printed.fileno(), size - self._mark, self._mark)
        # A crash is told by what it was and by the thread in which it was, which come first.
        crash = text.rfind(_CRASH)
        shown = text[crash : crash + limit] if crash >= 0 else text[-limit:]
        return shown.decode(errors="replace")

    def ask_stack(self) -> None:
        """Let the process print where it stands."""
        if self.process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGUSR2)

    def waits_in(self) -> str:
        """Find what the process waits for in the kernel, where the system tells."""
        with suppress(OSError):
            if function := Path(f"/proc/{self.process.pid}/wchan").read_text().strip("0"):
                return f" (in the kernel: {function})"
        return ""

    def end(self) -> None:
        self.process.join(GRACE)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self._tasks.close()
        self._printed.close()


def _forward(answers: Connection, rank: int, replies: queue.SimpleQueue) -> None:
    # The other end is closed, or this one is.
    with suppress(EOFError, OSError):
        while True:
            replies.put((rank, pickle.loads(answers.recv_bytes())))
    replies.put((rank, None))


def _python_path(entries: Sequence[str]) -> str:
    """``sys.path`` without the standard library, which a worker finds by itself."""
    own = {str(Path(entry).resolve()) for entry in (sys.prefix, sys.base_prefix)}
    kept = [e for e in entries if e and not any(str(Path(e).resolve()).startswith(p) for p in own)]
    return os.pathsep.join(kept)


class WorldPools:
    """Pools by number of ranks, each started when it is first asked for."""

    def __init__(self, device_type: str = "cpu") -> None:
        self.device_type = device_type
        self._pools: dict[int, WorkerPool] = {}

    def __call__(self, size: int) -> WorkerPool:
        if size not in self._pools:
            self._pools[size] = WorkerPool(size, device_type=self.device_type)
        return self._pools[size]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
