"""What a process of a :class:`unipar.testing.pool.WorkerPool` does."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import queue
import signal
import struct
import sys
import threading
import traceback
import warnings
from typing import Any, BinaryIO, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist

from unipar.world import Placement

HEADER = struct.Struct("!Q")


class Task(NamedTuple):
    """A function for this rank, pickled by cloudpickle with its arguments."""

    payload: bytes
    placement: Placement
    path: list[str]


class Outcome(NamedTuple):
    """What a task came to: a pickled value, or a pickled exception and its traceback."""

    payload: bytes
    traceback: str = ""


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next message, or ``None`` when the other side is gone."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    body = stream.read(length)
    return body if len(body) == length else None


def write_frame(stream: BinaryIO, body: bytes) -> None:
    stream.write(HEADER.pack(len(body)))
    stream.write(body)
    stream.flush()


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


def main() -> None:
    # What a task prints must not end up between the messages.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)

    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive() -> None:
        while (frame := read_frame(requests)) is not None:
            tasks.put(pickle.loads(frame))
        # The parent is gone, or done: end even where the main thread hangs in a collective.
        os._exit(0)

    threading.Thread(target=receive, daemon=True).start()
    num_modules = 0
    while True:
        write_frame(replies, pickle.dumps(perform(tasks.get())))
        if len(sys.modules) > num_modules:
            # What imports leave is no garbage, and to look through it takes longer than most tasks.
            gc.freeze()
            num_modules = len(sys.modules)
