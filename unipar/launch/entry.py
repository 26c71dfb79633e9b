"""The work of a worker process: take its payload, run it, and record how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import process
from pathlib import Path
from typing import Any

import cloudpickle

from unipar.errors import ConfigError, Terminated, UniparError, WorkerError
from unipar.launch.detection import detect
from unipar.launch.elastic import open_member
from unipar.launch.failure import Kind, open_notes, write_failure
from unipar.launch.rundir import Attempt, RunDir, fresh
from unipar.utils.progress_marks import open_marks
from unipar.utils.replacing import replacing
from unipar.utils.scratch import temporary_files
from unipar.utils.signals import passed_on
from unipar.utils.subprocesses import end_with
from unipar.utils.torch_settings import set_torch
from unipar.world import Placement

# Longer than the launching process takes to tell who is missing and end this process.
_LINGER = 15.0
_REQUEST_POLL = 0.5
PARENT = "UNIPAR_PARENT"
"""The variable with the number of the process that this one must not outlive; the parent may be
gone before this one has come to look who it is."""

RUN, RESTART = "UNIPAR_RUN", "UNIPAR_RESTART"
"""The variables by which a process that was started elsewhere knows its run, and which start of it
this is: what the start before has left, on another machine maybe, is left by nobody who lives."""

REFUSED = 2
"""The exit code of a process whose error no restart changes."""


def serve(directory: str, start: dict[str, Any]) -> None:
    """Run the payload of ``directory`` in this process, as the rank that the environment names."""
    run = RunDir(Path(directory))
    elsewhere = start["parent"] is None
    placement = _joined(start) if elsewhere else _placement(start)
    attempt = run.attempt(placement.restart)
    if elsewhere:
        # Of a launcher on its node that was killed, the processes would go on.
        end_with(int(os.environ.get(PARENT) or os.getppid()))
        os.environ[RUN], os.environ[RESTART] = str(run.root), str(placement.restart)
        attempt.directory.mkdir(exist_ok=True)
        _join(run, attempt, placement)
    else:
        open_marks(attempt.mark(placement.rank))
        stack = attempt.stack(placement.rank).open("w")
        faulthandler.register(start["stack_signal"], file=stack, all_threads=False)
        left = [run.root, *start["places"]]
        end_with(start["parent"], lambda: [shutil.rmtree(one, ignore_errors=True) for one in left])
        open_member(run, placement.restart, start)
        # A killed process cannot remove the directory that it makes for its sockets.
        # CPython 3.11, Lib/multiprocessing/util.py, get_temp_dir.
        process.current_process()._config["tempdir"] = directory  # pyright: ignore[reportAttributeAccessIssue]
    open_notes(attempt.note(placement.rank))
    try:
        fn = _load(run.payload)
        value = None
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            value = fn(placement)
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if placement.rank == 0:
            _save(value, run.result)
        attempt.returned(placement.rank).touch()
    except BaseException as error:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            kind = write_failure(error, attempt, placement.rank)
        except OSError:
            traceback.print_exception(error)
            sys.exit(1)
        if kind is Kind.TIMEOUT and not elsewhere:
            # Leaving would close this rank's connections and give other waiting ranks a second
            # kind of error before their own time is up.
            time.sleep(_LINGER)
        if isinstance(error, Terminated):
            sys.exit(error.code)
        if kind is Kind.INTERRUPT:
            sys.exit(130)
        sys.exit(REFUSED if _refuses(error) else 1)


def _join(run: RunDir, attempt: Attempt, placement: Placement) -> None:
    """Take the place of what the launching process does for workers of its own machine."""
    path = attempt.log(placement.rank)
    try:
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        print(
            f"rank {placement.rank} has begun once in this start of the run ({path} is there), and "
            "what has failed is not started again by itself: max_restarts starts all ranks.",
            file=sys.stderr,
        )
        sys.exit(REFUSED)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    if placement.rank:
        return

    def watch() -> None:
        while True:
            time.sleep(_REQUEST_POLL)
            # Not where it is written: another request may take its place meanwhile.
            taken = run.request.with_suffix(".taken")
            fresh(run.root)
            # A network file system has errors of its own, which pass.
            with contextlib.suppress(OSError):
                run.request.replace(taken)
                number = int(taken.read_text())
                passed_on.add(number)
                os.kill(os.getpid(), number)

    threading.Thread(target=watch, name="unipar-requests", daemon=True).start()


def _refuses(error: BaseException) -> bool:
    """Return whether an error is one that no restart changes."""
    return isinstance(error, UniparError) and not isinstance(error, WorkerError)


def _load(payload: Path) -> Callable[[Placement], Any]:
    try:
        with payload.open("rb") as file:
            settings, fn = pickle.load(file)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"A worker process cannot load the function that it was sent: {error}. Functions and "
            "classes of modules are sent by name, so their module must be importable: put its "
            "directory on PYTHONPATH, or define them in the main script or the notebook."
        ) from error
    set_torch(settings)
    return fn


def _save(value: Any, path: Path) -> None:
    try:
        data = cloudpickle.dumps(value)
    except (pickle.PicklingError, TypeError) as error:
        raise ConfigError(
            f"Rank 0 returned a {type(value).__name__}, which cannot be sent to the calling "
            f"process: {error}. Return plain values, tensors or arrays."
        ) from error
    with temporary_files(), replacing(path) as partial:
        partial.write_bytes(data)


def _joined(start: dict[str, Any]) -> Placement:
    """Where another launcher's variables say that this process stands."""
    found = detect() or Placement()
    restart = max(found.restart, start["restart"])
    return dataclasses.replace(
        found, timeout=start["timeout"], device_type=start["device_type"], restart=restart
    )


def _placement(start: dict[str, Any]) -> Placement:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Placement(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        init_method="env://" if size > 1 else None,
        timeout=start["timeout"],
        device_type=start["device_type"],
        restart=int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    )
