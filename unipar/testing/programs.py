"""Python programs that begin with torch imported: forked, where a test would start an interpreter.

To start Python, import torch and end again takes two seconds of a processor, and a run under a
launcher does so on each rank. Within :func:`forked_programs` whatever this process starts by
``subprocess`` with its own interpreter is forked from one that has imported torch, and has done
nothing else; what that program starts is forked likewise. Its number, its parent, its streams and
other descriptors, its signals and its end are what they would be. What is not the same is what a
new interpreter would find out (how modules are searched for, and which are imported) and what the
system hands down besides: limits on resources, as set by the process that starts it. A test of
these takes :func:`new_interpreters`; what asks for more than :func:`_request` reads gets one by
itself.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

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
_CODE = "from unipar.testing.forks import serve"
# Without what the test sets that asks for the first program.
_ENVIRON = dict(os.environ)
# Linux, include/uapi/linux/prctl.h.
_PR_SET_CHILD_SUBREAPER = 36


# CPython 3.10 to 3.13, Lib/subprocess.py: Popen.__init__ makes pipes, has this method start the
# process, and needs no more to wait for it, to end it and to talk to it.
_EXECUTE = subprocess.Popen._execute_child  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def forked_programs() -> Iterator[None]:
    """Fork what ``subprocess`` would start with this interpreter; nothing changes but on Linux."""
    if sys.platform != "linux":
        yield
        return
    with _as_now():
        replace(Server.of_this_process)
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
            if of_a_server and process.pid != Server.pid:
                found.append(process)
    return found


class Server:
    """The process that programs are forked from, as seen from the one whose programs they are.

    A forked process is given up by its parent, and comes to the nearest process above that takes
    such ones: this one. So it can be waited for as if it had been started here.
    """

    pid = 0
    _own: Server | None = None

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._lock = threading.Lock()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)

    @classmethod
    def of_this_process(cls) -> Server:
        """The one of this process, which is started when it is first asked for."""
        if cls._own is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            code = f"{_CODE}; serve({theirs.fileno()})"
            with theirs, new_interpreters():
                process = subprocess.Popen(
                    [sys.executable, "-c", code, *_PRELOAD],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**_ENVIRON, "OMP_NUM_THREADS": "1"},
                )

            cls._own, cls.pid = cls(ours), process.pid
            cls._own.close_at_exit(process.wait)
        return cls._own

    def close_at_exit(self, wait: Callable[[], object]) -> None:
        """End the process, and wait for it, where this one ends.

        Args:
            wait: for the process.
        """
        process = os.getpid()

        def close() -> None:
            if os.getpid() != process:
                return
            # Not closed alone: a fork of this process may hold it open, and end after this.
            self._requests.shutdown(socket.SHUT_RDWR)
            self._requests.close()
            with contextlib.suppress(ChildProcessError):
                wait()

        atexit.register(close)

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


def replace(server: Callable[[], Server]) -> None:
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
        if not (executable or preexec_fn or shell):
            request = _request(args, cwd, env, new_session=bool(more[5]))
        if request is None:
            given = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
            _EXECUTE(self, *given)
            return
        ends = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        places = zip((p2cread, c2pwrite, errwrite), (0, 1, 2), strict=True)
        streams = [own if end == -1 else end for end, own in places]
        self.pid = server().fork({**request, "pass_fds": pass_fds}, [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*ends)

    popen: Any = subprocess.Popen
    popen._execute_child = execute


def _request(
    args: Any, cwd: Any, env: Mapping[Any, Any] | None, *, new_session: bool
) -> dict[str, Any] | None:
    """What to fork for a command; ``None`` for one that is to be started as it is."""
    variables = os.environ if env is None else env
    if not isinstance(args, (list, tuple)):
        return None
    first, *rest = (os.fsdecode(one) for one in args)
    if first != sys.executable:
        script = shutil.which(first, path=variables.get("PATH"))
        if script is None or not _is_ours(script):
            return None
        rest = [script, *rest]
    options: dict[str, Any] = {"unbuffered": False, "isolated": False, "warnings": []}
    while rest and rest[0].startswith(("-B", "-I", "-u", "-W")):
        flag = rest.pop(0)
        if flag == "-u":
            options["unbuffered"] = True
        elif flag == "-I":
            options["isolated"] = True
        elif flag != "-B":
            options["warnings"].append(flag[2:] or rest.pop(0))
    if not rest or (rest[0].startswith("-") and rest[0] not in ("-c", "-m")):
        return None
    kind = rest.pop(0) if rest[0] in ("-c", "-m") else ""
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


def _is_ours(script: str) -> bool:
    """Return whether it is one of the commands that were installed for this interpreter."""
    with open(script, "rb") as file:
        return file.read(256).splitlines()[:1] == [b"#!" + os.fsencode(sys.executable)]
