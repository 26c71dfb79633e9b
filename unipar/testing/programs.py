"""Python programs that begin with torch imported: forked, where a test would start an interpreter.

To start Python, import torch and end again takes two seconds of a processor, and a run under a
launcher does so on each rank. Within :func:`forked_programs` whatever this process starts by
``subprocess`` with its own interpreter is forked from one that has imported torch, and has done
nothing else; what that program starts is forked likewise. Its number, its parent, its streams, its
signals and its end are what they would be. What is not the same is what a new interpreter would
find out (how modules are searched for, and which are imported) and what the system hands down
besides: limits on resources, as set by the process that starts it. A test of these takes
:func:`new_interpreters`; what asks for more than :func:`_request` reads gets one by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import process as multiprocess
from typing import Any, NoReturn

import psutil

_PRELOAD = [
    "unipar.testing.preload",
    "unipar.launch.preload",
    "unipar.train.fit",
    "unipar.cli.app",
    "unipar_torch.ddp",
    "unipar_torch.fsdp",
    "unipar_torch.single",
    "torch.distributed.run",
]
_CODE = "from unipar.testing.programs import serve"
# Without what the test sets that asks for the first program.
_ENVIRON = dict(os.environ)
_MESSAGE = 1 << 17
_POLL = 0.001
# Linux, include/uapi/linux/prctl.h.
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)


# CPython 3.10 to 3.13, Lib/subprocess.py: Popen.__init__ makes pipes, has this method start the
# process, and needs no more to wait for it, to end it and to talk to it.
_EXECUTE = subprocess.Popen._execute_child  # pyright: ignore[reportAttributeAccessIssue]


def preload(*modules: str) -> None:
    """Import these, too, in what programs are forked from; before the first is."""
    _PRELOAD.extend(modules)


@contextlib.contextmanager
def forked_programs() -> Iterator[None]:
    """Fork what ``subprocess`` would start with this interpreter; nothing changes but on Linux."""
    if sys.platform != "linux":
        yield
        return
    with _as_now():
        _replace(_Server.of_this_process)
        yield


@contextlib.contextmanager
def new_interpreters() -> Iterator[None]:
    """Start what is started in the block as it is, within :func:`forked_programs` too."""
    with _as_now():
        popen: Any = subprocess.Popen
        popen._execute_child = _EXECUTE
        yield


@contextlib.contextmanager
def _as_now() -> Iterator[None]:
    popen: Any = subprocess.Popen
    before = popen._execute_child
    try:
        yield
    finally:
        popen._execute_child = before


def running() -> list[psutil.Process]:
    """The forked programs of this process that have not ended, and theirs."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            of_a_server = any(_CODE in part for part in process.cmdline())
            if of_a_server and process.pid != _Server.pid:
                found.append(process)
    return found


class _Server:
    """The process that programs are forked from, as seen from the one whose programs they are.

    A forked process is given up by its parent, and comes to the nearest process above that takes
    such ones: this one. So it can be waited for as if it had been started here.
    """

    pid = 0
    _own: _Server | None = None

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._lock = threading.Lock()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)

    @classmethod
    def of_this_process(cls) -> _Server:
        """The one of this process, which is started when it is first asked for."""
        if cls._own is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            code = f"{_CODE}; serve({theirs.fileno()})"
            with theirs:
                # Descriptors are passed on to new interpreters only.
                process = subprocess.Popen(
                    [sys.executable, "-c", code, *_PRELOAD],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**_ENVIRON, "OMP_NUM_THREADS": "1"},
                )

            def close() -> None:
                ours.close()
                process.wait()

            atexit.register(close)
            cls._own, cls.pid = cls(ours), process.pid
        return cls._own

    def fork(self, request: Mapping[str, Any], streams: Sequence[int]) -> int:
        """Start a program; its number.

        Raises:
            RuntimeError: there is nothing left to fork it from.
        """
        with self._lock:
            socket.send_fds(self._requests, [json.dumps(request).encode()], list(streams))
            answer = self._requests.recv(64)
        if not answer:
            raise RuntimeError("What programs are forked from has ended; see its output above.")
        return int(answer)


def _replace(server: Callable[[], _Server]) -> None:
    """Have ``subprocess`` ask ``server()`` for this interpreter's programs."""

    def execute(
        self: Any,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: tuple[int, ...],
        cwd: Any,
        env: Any,
        *rest: Any,
    ) -> None:
        _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *more = rest
        request = None
        if not (executable or preexec_fn or shell or pass_fds):
            request = _request(args, cwd, env, new_session=bool(more[5]))
        if request is None:
            given = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            _EXECUTE(self, *given)
            return
        ends = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        places = zip((p2cread, c2pwrite, errwrite), (0, 1, 2), strict=True)
        self.pid = server().fork(request, [own if end == -1 else end for end, own in places])
        self._child_created = True
        self._close_pipe_fds(*ends)

    popen: Any = subprocess.Popen
    popen._execute_child = execute


def _request(
    args: Any, cwd: Any, env: Mapping[Any, Any] | None, *, new_session: bool
) -> dict[str, Any] | None:
    """What to fork for a command; ``None`` for one that is to be started as it is."""
    if not isinstance(args, (list, tuple)) or os.fspath(args[0]) != sys.executable:
        return None
    rest = [os.fsdecode(one) for one in args[1:]]
    options: dict[str, Any] = {"unbuffered": False, "warnings": []}
    while rest and rest[0].startswith(("-B", "-u", "-W")):
        flag = rest.pop(0)
        if flag == "-u":
            options["unbuffered"] = True
        elif flag != "-B":
            options["warnings"].append(flag[2:] or rest.pop(0))
    if not rest or (rest[0].startswith("-") and rest[0] not in ("-c", "-m")):
        return None
    kind = rest.pop(0) if rest[0] in ("-c", "-m") else ""
    variables = os.environ if env is None else env
    path = os.fsdecode(variables.get("PYTHONPATH", "")).split(os.pathsep)
    if any(os.path.exists(os.path.join(entry, "sitecustomize.py")) for entry in path):
        # It acts when an interpreter starts, as that does which records a script's losses.
        return None
    return {
        **options,
        "kind": kind,
        "what": rest[0],
        "argv": rest[1:],
        "cwd": os.path.abspath(os.fsdecode(cwd or ".")),
        "environ": {os.fsdecode(name): os.fsdecode(variables[name]) for name in variables},
        "new_session": new_session,
        "parent": os.getpid(),
    }


# -- in the process that forks, and in those that are forked ---------------------------------------


def serve(descriptor: int) -> None:
    """Import the modules that the command line names, and fork a program for each request.

    Args:
        descriptor: of the socket that requests come by.
    """
    atexit.register(_leave)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    path = sys.path[1:]
    from unipar.utils.garbage_collection import no_collection

    with no_collection():
        for module in sys.argv[1:]:
            importlib.import_module(module)
    del sys.argv[1:]
    import gc

    gc.freeze()
    with socket.socket(fileno=descriptor) as requests:
        _serve(requests, path)


def _serve(requests: socket.socket, path: list[str]) -> None:
    """Fork a program for each request; returns when there are no more."""
    while True:
        message, streams, _, _ = socket.recv_fds(requests, _MESSAGE, 3)
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
    for place, stream in enumerate(streams):
        os.dup2(stream, place)
        os.close(stream)
    _fork_on(path)
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


def _fork_on(path: list[str]) -> None:
    """Have a process of this one's own, as it is now, from which its programs are forked."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        global _code
        _code = None
        ours.close()
        with open(os.devnull, "r+") as nothing:
            for place in (0, 1, 2):
                os.dup2(nothing.fileno(), place)
        with theirs:
            _serve(theirs, path)
        os._exit(0)
    theirs.close()
    own = _Server(ours)
    _replace(lambda: own)

    def close() -> None:
        ours.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)

    atexit.register(close)


def _reset(request: Mapping[str, Any], path: list[str]) -> None:
    """Let nothing be left of the process that this one was forked from, but for its modules."""
    import numpy as np
    import torch

    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    variables = os.environ
    first = os.path.dirname(os.path.abspath(request["what"])) if not request["kind"] else ""
    if request["kind"] == "-m":
        first = request["cwd"]
    paths = [entry for entry in variables.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [first, *paths, *(entry for entry in path if entry not in paths)]
    sys.argv[:] = [request["kind"] or request["what"], *request["argv"]]
    importlib.invalidate_caches()
    warnings.resetwarnings()
    for option in request["warnings"] or ["ignore"]:
        warnings.simplefilter(option)
    sys.warnoptions[:] = request["warnings"]
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
    torch.set_num_threads(int(variables.get("OMP_NUM_THREADS", os.cpu_count() or 1)))
    np.random.seed()
    torch.seed()
