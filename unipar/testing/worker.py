"""The work of a process of a :class:`unipar.testing.pool.WorkerPool`."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist

from unipar.world import Placement


class Task(NamedTuple):
    """A function for this rank, pickled by cloudpickle with its arguments."""

    payload: bytes
    placement: Placement
    path: list[str]


class Outcome(NamedTuple):
    """The outcome of a task: a pickled value, or a pickled exception and its traceback."""

    payload: bytes
    traceback: str = ""


def perform(task: Task) -> Outcome:
    sys.path.extend(entry for entry in task.path if entry not in sys.path)
    torch.manual_seed(0)
    try:
        fn, args = pickle.loads(task.payload)
        return Outcome(cloudpickle.dumps(fn(task.placement, *args)))
    except Exception as error:
        return Outcome(_picklable(error), traceback.format_exc())
    finally:
        # Leaving at once also frees the ranks that wait in a collective for this one.
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        # What a task prints belongs to it, and not to the one that fills the buffer.
        sys.stdout.flush()


def _picklable(error: Exception) -> bytes:
    """``error`` as bytes that can be read back, or a RuntimeError with its text."""
    try:
        payload = cloudpickle.dumps(error)
        pickle.loads(payload)
    except Exception:
        return cloudpickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return payload


def work(tasks: Connection, printed: Connection, environ: Mapping[str, str]) -> None:
    """Perform tasks until the other end of their connection is closed.

    Args:
        tasks: brings each :class:`Task`, and takes its :class:`Outcome`.
        printed: where standard output and error go.
        environ: the environment variables, in place of those that this process has inherited.
    """
    # Ctrl-C is for the test session; it then ends the workers itself.
    os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    for descriptor in (1, 2):
        os.dup2(printed.fileno(), descriptor)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=False)

    received: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive() -> None:
        try:
            while True:
                received.put(pickle.loads(tasks.recv_bytes()))
        except (EOFError, OSError):
            # The parent is gone, or done: end even where the main thread hangs in a collective.
            os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    num_modules = 0
    while True:
        tasks.send_bytes(pickle.dumps(perform(received.get())))
        if len(sys.modules) > num_modules:
            # What imports leave is no garbage, and to look through it takes longer than most tasks.
            gc.freeze()
            num_modules = len(sys.modules)
