"""The process that programs are forked from, and what it takes to be one; see ``programs``."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing import process as multiprocess
from typing import Any, NoReturn

from unipar.testing.programs import Server, replace
from unipar.utils.garbage_collection import no_collection

_MESSAGE = 1 << 17
_DESCRIPTORS = 64
_POLL = 0.001
_IGNORE_ALL = ("ignore", None, Warning, None, 0)
_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)


def serve(descriptor: int) -> None:
    """Import the modules that the command line names, and fork a program for each request.

    Args:
        descriptor: of the socket that requests come by.
    """
    atexit.register(_leave)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    path = sys.path[1:]
    with no_collection():
        for module in sys.argv[1:]:
            importlib.import_module(module)
        gc.freeze()
    del sys.argv[1:]
    # The one of unipar.testing.preload, whose workers print for nobody.
    filters: Any = warnings.filters
    filters.remove(_IGNORE_ALL)
    with socket.socket(fileno=descriptor) as requests:
        _serve(requests, path)


def _serve(requests: socket.socket, path: list[str]) -> None:
    """Fork a program for each request; returns when there are no more."""
    while True:
        message, streams, _, _ = socket.recv_fds(requests, _MESSAGE, _DESCRIPTORS)
        if not message:
            return
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(_POLL)
            request = json.loads(message)
            if os.getppid() != request["parent"]:
                # It has been killed.
                os._exit(1)
            requests.send(str(os.getpid()).encode())
            requests.close()
            _become(request, streams, path)
        for stream in streams:
            os.close(stream)
        os.waitpid(between, 0)


_code: int | None = None


def _leave() -> None:
    """End a program as an interpreter ends, but for taking itself apart.

    Registered before anything else, and so called last of all.
    """
    if _code is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if _code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(_code)


def _become(request: Mapping[str, Any], streams: Sequence[int], path: list[str]) -> NoReturn:
    """Be the program that was asked for."""
    global _code
    _code = 0
    if request["new_session"]:
        os.setsid()
    _place(streams, [0, 1, 2, *request["pass_fds"]])
    _fork_on(path, request["pass_fds"])
    os.chdir(request["cwd"])
    # Where its own processes look for a main module that is named by a relative path.
    multiprocess.ORIGINAL_DIR = request["cwd"]  # pyright: ignore[reportAttributeAccessIssue]
    os.environ.clear()
    os.environ.update(request["environ"])
    _reset(request, path)
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    try:
        try:
            if request["kind"] == "-m":
                sys.modules["__main__"] = main
                runpy.run_module(request["what"], run_name="__main__", alter_sys=True)
            else:
                exec(_compiled(request, main), main.__dict__)
        except SystemExit as end:
            _code = _code_of(end)
        except BaseException as error:
            _code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
            # This file's own frame is the first.
            below = error.__traceback__ and error.__traceback__.tb_next
            sys.excepthook(type(error), error.with_traceback(below), below)
    except BaseException:
        # Also by an exception hook of the program's.
        _code = 1
        traceback.print_exc()
    sys.exit()


def _compiled(request: Mapping[str, Any], main: types.ModuleType) -> types.CodeType:
    sys.modules["__main__"] = main
    what = request["what"]
    if request["kind"] == "-c":
        return compile(what, "<string>", "exec")
    main.__file__ = what
    with open(what, "rb") as file:
        return compile(file.read(), what, "exec")


def _code_of(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give descriptors these numbers, whatever numbers they have."""
    above = max(*descriptors, *numbers) + 1
    # First out of the way of one another.
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD, above) for one in descriptors]
    for one in descriptors:
        os.close(one)
    for one, number in zip(moved, numbers, strict=True):
        os.dup2(one, number)
        os.close(one)


def _fork_on(path: list[str], held: Sequence[int]) -> None:
    """Have a process of this one's own, as it is now, from which its programs are forked.

    Args:
        path: where it looks for modules.
        held: descriptors of this process that it is not to hold open.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        global _code
        _code = None
        ours.close()
        with open(os.devnull, "r+") as nothing:
            for place in (0, 1, 2):
                os.dup2(nothing.fileno(), place)
        for descriptor in held:
            os.close(descriptor)
        with theirs:
            _serve(theirs, path)
        os._exit(0)
    theirs.close()
    own = Server(ours)
    replace(lambda: own)

    own.close_at_exit(lambda: os.waitpid(pid, 0))


def _reset(request: Mapping[str, Any], path: list[str]) -> None:
    """Let nothing be left of the process that this one was forked from, but for its modules."""
    import numpy as np
    import torch

    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    variables = os.environ
    first = [os.path.dirname(os.path.abspath(request["what"])) if not request["kind"] else ""]
    if request["kind"] == "-m":
        first = [request["cwd"]]
    paths = [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]
    if request["isolated"]:
        first = paths = []
    sys.path[:] = [*first, *paths, *(entry for entry in path if entry not in paths)]
    sys.argv[:] = [request["kind"] or request["what"], *request["argv"]]
    importlib.invalidate_caches()
    options: list[Any] = request["warnings"]
    for option in options:
        warnings.simplefilter(option)
    sys.warnoptions[:] = options
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - for the life of the process
    for name, place in (("stdout", 1), ("stderr", 2)):
        stream = io.TextIOWrapper(
            open(place, "wb", buffering=-1, closefd=False),  # noqa: SIM115 - the same
            encoding="utf-8",
            errors="strict" if place == 1 else "backslashreplace",
            line_buffering=place == 2 or os.isatty(place),
            write_through=request["unbuffered"],
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    # What is imported may have asked for it, before there was TMPDIR.
    tempfile.tempdir = None
    torch.set_num_threads(int(variables.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    np.random.seed()
    torch.seed()
    if any(os.path.exists(os.path.join(entry, "sitecustomize.py")) for entry in paths):
        # It acts when an interpreter starts, as that does which records a script's losses.
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
