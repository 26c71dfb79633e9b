"""Hosts on one machine: network namespaces, with cables between them."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Called as ssh is: the host, then a line for its shell.
_AGENT = """#!/bin/sh
host=$1
shift
exec ip netns exec "$host" sh -c "$*"
"""
_NAMESPACES = Path("/run/netns")
_numbers = itertools.count()


def usable() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=not check)


@dataclass
class Hosts:
    """Two hosts, named by their namespaces.

    Attributes:
        names: of the two; each host knows the other by it.
        agent: a command like ssh.
        cable: the interface of the first that leads to the second.
    """

    names: tuple[str, str]
    agent: Path
    cable: str = "cable0"

    def inside(self, host: int, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[host], *command]

    def cut(self) -> None:
        # Of the other one: without its own interface the first would not even reach itself.
        ip("-n", self.names[1], "link", "set", self.cable, "down")

    def processes(self) -> list[int]:
        """The processes that run on any of them."""
        return [pid for name in self.names for pid in _processes(name)]


@contextlib.contextmanager
def two_hosts(
    directory: Path, *, version: int = 4, own_name_is_loopback: bool = False, apart: bool = False
) -> Iterator[Hosts]:
    """Two hosts for the length of the block; whatever runs there ends with it.

    Each has an interface besides that leads nowhere, and has the lower number.

    Args:
        directory: for files of theirs.
        version: of IP, 4 or 6.
        own_name_is_loopback: each finds its own name at 127.0.1.1, as Debian sets it up.
        apart: the cable is cut from the beginning.
    """
    _delete_abandoned()
    mark = f"unipar-{os.getpid()}-{next(_numbers)}"
    names = (f"{mark}a", f"{mark}b")
    addresses = [f"10.77.1.{n}" if version == 4 else f"fd77::{n}" for n in (1, 2)]
    agent = directory / "agent"
    agent.write_text(_AGENT)
    agent.chmod(0o755)
    hosts = Hosts(names, agent)
    try:
        for name in names:
            ip("netns", "add", name)
        for name in names:
            # The one that leads nowhere.
            ip("-n", name, "link", "add", "aside0", "type", "veth", "peer", "name", "aside1")
            ip("-n", name, "link", "set", "aside1", "up")
        ends = ["type", "veth", "peer", "name", hosts.cable, "netns", names[1]]
        ip("link", "add", "name", hosts.cable, "netns", names[0], *ends)
        width = 24 if version == 4 else 64
        for at, name in enumerate(names):
            aside = f"10.99.{at}.1/24" if version == 4 else f"fd99:{at}::1/64"
            own = ["nodad"] if version == 6 else []
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "address", "add", aside, "dev", "aside0", *own)
            ip("-n", name, "link", "set", "aside0", "up")
            ip("-n", name, "address", "add", f"{addresses[at]}/{width}", "dev", hosts.cable, *own)
            ip("-n", name, "link", "set", hosts.cable, "up")
            # Put over /etc by `ip netns exec`.
            etc = Path("/etc/netns", name)
            etc.mkdir(parents=True)
            lines = ["127.0.0.1 localhost", "::1 localhost"]
            for other, address in enumerate(addresses):
                near = own_name_is_loopback and other == at
                lines.append(f"{'127.0.1.1' if near else address} {names[other]}")
            if own_name_is_loopback:
                # What the system calls itself, for all of them share that.
                lines.append(f"127.0.1.1 {socket.gethostname()}")
            (etc / "hosts").write_text("\n".join([*lines, ""]))
        if apart:
            hosts.cut()
        yield hosts
    finally:
        _delete(names)


def _processes(name: str) -> list[int]:
    told = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
    return [int(one) for one in told.stdout.split()]


def _delete(names: Iterable[str]) -> None:
    for name in names:
        for pid in _processes(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ip("netns", "delete", name, check=False)
        shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


def _delete_abandoned() -> None:
    """Delete hosts of a test run that was killed before it could."""
    names = os.listdir(_NAMESPACES) if _NAMESPACES.is_dir() else []
    for name in names:
        of_tests = re.fullmatch(r"unipar-(\d+)-\d+[ab]", name)
        if of_tests and not Path("/proc", of_tests[1]).exists():
            _delete([name])
