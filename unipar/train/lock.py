"""One run at a time in a directory: a file that says which run has it, kept fresh while it lives.

A run that was killed leaves its file. On the same machine the next one sees that the process is
gone. On another it sees that the file has not been touched for :data:`LEASE` seconds, by the clock
of the file system, which all machines share.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import os
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from unipar.errors import ConfigError
from unipar.launch.entry import RESTART, RUN

logger = logging.getLogger(__name__)

NAME = ".run.lock"
BEAT = 20.0
"""Seconds between two touches of the file."""
LEASE = 300.0
"""Seconds without a touch after which a run on another machine counts as gone."""

_ATTEMPTS = {
    "TORCHELASTIC_RUN_ID": "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID": "SLURM_RESTART_COUNT",
    RUN: RESTART,
}
"""Launchers end all processes of an attempt before they start the next, on whatever machine."""


class _Found(NamedTuple):
    """A lock as it was read: its bytes, what they say, and seconds since it was touched."""

    content: bytes
    holder: dict[str, Any]
    age: float


@contextlib.contextmanager
def held(*directories: Path) -> Iterator[None]:
    """Hold directories, which exist, for the length of the block.

    Raises:
        ConfigError: another run holds one of them; says who.
        OSError: the file cannot be written.
    """
    content = json.dumps(_self(), indent=1).encode()
    ended = threading.Event()
    with contextlib.ExitStack() as taken:
        paths: list[Path] = []
        for path in _locks(directories):
            # First, so that an interrupt leaves no file; what is not its own it leaves alone.
            taken.callback(_release, path, content)
            _take(path, content)
            paths.append(path)
        beating = threading.Thread(
            target=_beat, args=(paths, content, ended), name="unipar-lock", daemon=True
        )
        beating.start()
        try:
            yield
        finally:
            ended.set()
            beating.join()


def refuse_if_held(*directories: Path) -> None:
    """Raise a :class:`ConfigError` if another run holds one of these directories."""
    for path in _locks(directories):
        found = _read(path)
        if found is not None:
            _refuse_if_alive(path, found)


def is_gone(holder: Mapping[str, Any], age: float) -> bool:
    """Whether the run that wrote a lock lives no more.

    Args:
        holder: what the lock says.
        age: seconds since it was touched.
    """
    if _is_of_this_machine(holder):
        return not _runs(holder.get("pid"), holder.get("started"))
    return age >= LEASE


def _is_of_this_machine(holder: Mapping[str, Any]) -> bool:
    return bool(holder.get("machine")) and holder["machine"] == _machine()


def _locks(directories: tuple[Path, ...]) -> list[Path]:
    """A file in each directory; one that is named twice has one."""
    return [path / NAME for path in dict.fromkeys(map(Path.resolve, directories))]


def _self() -> dict[str, Any]:
    return {
        "user": _user(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "machine": _machine(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "attempts": _attempts(),
        "token": uuid.uuid4().hex,
    }


def _take(path: Path, content: bytes) -> None:
    while True:
        try:
            file = open(path, "xb")  # noqa: SIM115 - closed below
        except FileExistsError:
            found = _read(path)
        else:
            try:
                with file:
                    file.write(content)
            except OSError:
                path.unlink()
                raise
            return
        if found is not None:
            _refuse_if_alive(path, found)
            if _replaced(path, found.content, content):
                logger.warning(
                    "took %s over from %s, which is gone", path.parent, _described(found.holder)
                )
                return


def _replaced(path: Path, left: bytes, content: bytes) -> bool:
    """Put a lock in place of one that was left, unless another run is doing so or has done it."""
    guard, own = (path.with_name(f"{path.name}-{name}") for name in ("takeover", uuid.uuid4().hex))
    try:
        guard.touch(exist_ok=False)
    except FileExistsError:
        # It is there for a moment, unless its process was killed in that moment.
        with contextlib.suppress(FileNotFoundError):
            if _age(guard) > BEAT:
                guard.unlink()
        time.sleep(0.05)
        return False
    try:
        if path.read_bytes() != left:
            return False
        own.write_bytes(content)
        own.replace(path)
        return True
    except FileNotFoundError:
        return False
    finally:
        own.unlink(missing_ok=True)
        guard.unlink(missing_ok=True)


def _release(path: Path, content: bytes) -> None:
    try:
        if path.read_bytes() == content:
            path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        logger.warning("cannot remove %s: %s", path, error.strerror)


def _beat(paths: list[Path], content: bytes, ended: threading.Event) -> None:
    """Touch the files until the run has ended; say once of each what goes wrong with it."""
    said: set[Path] = set()
    while not ended.wait(BEAT):
        for path in paths:
            problem = None
            try:
                if path.read_bytes() == content:
                    os.utime(path)
                else:
                    problem = "another run has taken it over: end one of the two"
            except OSError as error:
                problem = f"{error.strerror}; another run may take it for free"
            if problem is not None and path not in said:
                said.add(path)
                logger.error("this run no longer holds %s: %s", path.parent, problem)


def clock(directory: Path) -> float:
    """What time it is to the file system of a directory, in seconds since the epoch.

    The times of files are to be held against this: the clocks of two machines need not agree.

    Raises:
        OSError: the directory cannot be written.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        return os.fstat(file.fileno()).st_mtime


def _age(path: Path) -> float:
    """Seconds since a file was touched."""
    return max(0.0, clock(path.parent) - path.stat().st_mtime)


def _read(path: Path) -> _Found | None:
    try:
        content, age = path.read_bytes(), _age(path)
    except FileNotFoundError:
        return None
    try:
        holder = json.loads(content)
    except ValueError:
        # It is being written, or was when its machine went down.
        holder = None
    return _Found(content, holder if isinstance(holder, dict) else {}, age)


def _refuse_if_alive(path: Path, found: _Found) -> None:
    holder = found.holder
    attempts = holder.get("attempts")
    for job, attempt in _attempts().items():
        earlier = attempts.get(job) if isinstance(attempts, dict) else None
        if isinstance(earlier, int) and earlier < attempt:
            return
    if is_gone(holder, found.age):
        return
    lapses = ""
    if not _is_of_this_machine(holder):
        left = LEASE - found.age
        lapses = f" If it was killed, the directory is free {left:.0f} s after this message."
    raise ConfigError(
        f"{path.parent} is in use by {_described(holder)} (last seen {found.age:.0f} s ago). Two "
        "runs would overwrite each other's files. Wait until it has ended, or end it, or choose "
        f"another output_dir (and checkpoint directory).{lapses}"
    )


def _described(holder: dict[str, Any]) -> str:
    if not holder:
        return "another run, which has yet to say whose it is"
    user, host, pid, since = (holder.get(key, "?") for key in ("user", "host", "pid", "since"))
    return f"a run of {user} on {host}, process {pid}, since {since}"


def _attempts() -> dict[str, int]:
    """The jobs that this process belongs to, and which attempt at them this is."""
    attempts: dict[str, int] = {}
    for job, count in _ATTEMPTS.items():
        identifier, attempt = os.environ.get(job), os.environ.get(count, "0")
        # torchrun says "none" where the user has named no job, so that all have one name.
        if identifier and identifier != "none" and attempt.isdecimal():
            attempts[f"{job}={identifier}"] = int(attempt)
    return attempts


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container may run under a user that it has no name for.
        return f"user {os.getuid()}"


def _machine() -> str:
    """Identify the processes that this one can see; empty where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _runs(pid: Any, started: Any) -> bool:
    """Whether a process of this machine runs, and is not another that got its number since."""
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        # Another user's, of whom the system may tell no more.
        pass
    now = _started(pid)
    return now is None or started is None or now == started


def _started(pid: int) -> int | None:
    """When a process started, in ticks since the machine did; -1 where it has ended, if known."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return -1 if fields[0] in "ZX" else int(fields[19])
