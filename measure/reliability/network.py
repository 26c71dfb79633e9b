"""Hosts on one machine, and a network between them that can be cut, slow and lossy.

A host is a network namespace with a name and an interface of its own (root, with iproute2). What
the interfaces send comes to one process, which hands it on to other hosts: late, or not at all, as
it is told. That takes nothing of the kernel but TUN devices; netem is not in every one.

python measure/reliability/network.py NAMESPACE...   forwards, as lines of standard input say
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import random
import re
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_NETNS = Path("/run/netns")
_INTERFACE = "eth0"
_PREFIX = "unipar-host"
# Called as ssh is: the host, then a line for its shell. Of a host without power it hears nothing.
_AGENT = """#!/bin/sh
host=$1
shift
{enter} "$host" sh -c "$*"
code=$?
[ $code = 137 ] && sleep 45
exit $code
"""
# Each process has the namespace's /etc/hosts, and the host's own name.
_ENTER = """#!/bin/sh
host=$1
shift
exec ip netns exec "{mark}-$host" unshare --uts sh -c 'hostname "$0" && exec "$@"' "$host" "$@"
"""
_numbers = itertools.count()


def missing() -> str:
    """What of this machine does not do for it; empty if all does."""
    if os.geteuid() != 0 or shutil.which("ip") is None or not Path("/dev/net/tun").exists():
        return "takes root, the command ip (Debian's iproute2) and /dev/net/tun"
    return ""


@dataclass
class Hosts:
    """Hosts by number; the network between them is whole at first.

    Attributes:
        names: of the hosts, by which each finds the others.
        agent: a command that is called as ssh is.
    """

    names: Sequence[str]
    agent: Path
    _mark: str
    _enter: Path
    _switch: subprocess.Popen[str]
    _lost: set[int] = field(default_factory=set)
    _rules: dict[str, Any] = field(default_factory=dict)

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def inside(self, host: int, *command: str) -> list[str]:
        return [str(self._enter), self.names[host], *command]

    def set(self, *, delay: float = 0.0, loss: float = 0.0) -> None:
        """Let each packet come so many seconds late, and a part of them never."""
        self._tell(delay=delay, loss=loss)

    def cut(self, host: int) -> None:
        """Let nothing pass between a host and the others; no interface goes down by that."""
        self._lost.add(host)
        self._tell(lost=sorted(self._lost))

    def join(self, host: int) -> None:
        """Undo :meth:`cut`."""
        self._lost.discard(host)
        self._tell(lost=sorted(self._lost))

    def unplug(self, host: int) -> None:
        """Let a host's interface go down, of which its programs are told."""
        _ip("-n", self._namespace(host), "link", "set", _INTERFACE, "down")

    def freeze(self, host: int) -> None:
        """Stop every process of a host; its kernel goes on to answer."""
        self._signal(host, signal.SIGSTOP)

    def power_off(self, host: int) -> None:
        """End every process of a host, of which the others hear nothing."""
        self.cut(host)
        self._signal(host, signal.SIGKILL)

    def processes(self, host: int) -> list[int]:
        told = subprocess.run(
            ["ip", "netns", "pids", self._namespace(host)], capture_output=True, text=True
        )
        return [int(one) for one in told.stdout.split()]

    def _namespace(self, host: int) -> str:
        return f"{self._mark}-{self.names[host]}"

    def _signal(self, host: int, number: signal.Signals) -> None:
        done: set[int] = set()
        # Until none is new: they start others.
        while new := set(self.processes(host)) - done:
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            done |= new

    def _tell(self, **rules: Any) -> None:
        self._rules |= rules
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write(json.dumps(self._rules) + "\n")
        self._switch.stdin.flush()
        # It has been done when this is answered.
        self._switch.stdout.readline()


@contextlib.contextmanager
def hosts(directory: Path, count: int) -> Iterator[Hosts]:
    """So many hosts, ``a``, ``b``, …; whatever runs there ends with the block.

    Args:
        directory: for files of theirs.
        count: of hosts.
    """
    _delete_abandoned()
    mark = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
    names = [chr(ord("a") + number) for number in range(count)]
    enter, agent = directory / "enter", directory / "agent"
    for script, text in ((enter, _ENTER), (agent, _AGENT)):
        script.write_text(text.format(mark=mark, enter=enter))
        script.chmod(0o755)
    namespaces = [f"{mark}-{name}" for name in names]
    switch: subprocess.Popen[str] | None = None
    try:
        for namespace in namespaces:
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        switch = subprocess.Popen(
            [sys.executable, __file__, *namespaces],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        made = Hosts(names, agent, mark, enter, switch)
        assert switch.stdout is not None
        switch.stdout.readline()
        lines = [
            "127.0.0.1 localhost",
            *(f"{made.address(n)} {own}" for n, own in enumerate(names)),
        ]
        for number, namespace in enumerate(namespaces):
            _ip("-n", namespace, "address", "add", f"{made.address(number)}/24", "dev", _INTERFACE)
            _ip("-n", namespace, "link", "set", _INTERFACE, "up")
            # Put over /etc by `ip netns exec`.
            etc = Path("/etc/netns", namespace)
            etc.mkdir(parents=True)
            (etc / "hosts").write_text("\n".join([*lines, ""]))
        yield made
    finally:
        _delete(namespaces)
        if switch is not None:
            switch.communicate()


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=not check)


def _delete(namespaces: Sequence[str]) -> None:
    for name in namespaces:
        while pids := subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True
        ).stdout.split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)
        _ip("netns", "delete", name, check=False)
        shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


def _delete_abandoned() -> None:
    """Delete hosts of a process that was killed before it could."""
    for name in os.listdir(_NETNS) if _NETNS.is_dir() else []:
        of_ours = re.fullmatch(rf"{_PREFIX}-(\d+)-\d+-\w+", name)
        if of_ours and not Path("/proc", of_ours[1]).exists():
            _delete([name])


# -- the process between the hosts -----------------------------------------------------------------

# linux/if_tun.h, linux/sched.h
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000


def forward(namespaces: Sequence[str]) -> None:
    """Hand packets on until standard input ends."""
    tuns = _tuns(namespaces)
    number_of = {tun: number for number, tun in enumerate(tuns)}
    rules: dict[str, Any] = {"delay": 0.0, "loss": 0.0, "lost": []}
    late: list[tuple[float, int, int, bytes]] = []
    order, chance = itertools.count(), random.Random(0)
    selector = selectors.DefaultSelector()
    for one in (0, *tuns):
        selector.register(one, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        wait = max(0.0, late[0][0] - time.monotonic()) if late else None
        for key, _ in selector.select(wait):
            if key.fd == 0:
                told = os.read(0, 65536)
                if not told:
                    return
                rules |= json.loads(told.splitlines()[-1])
                print("done", flush=True)
                continue
            packet = os.read(key.fd, 65536)
            there = _destination(packet)
            here = number_of[key.fd]
            if there is None or there >= len(tuns) or {here, there} & set(rules["lost"]):
                continue
            if chance.random() < rules["loss"]:
                continue
            due = time.monotonic() + rules["delay"]
            heapq.heappush(late, (due, next(order), there, packet))
        while late and late[0][0] <= time.monotonic():
            _, _, there, packet = heapq.heappop(late)
            # An interface that is not up yet takes none.
            with contextlib.suppress(OSError):
                os.write(tuns[there], packet)


def _destination(packet: bytes) -> int | None:
    """The number of the host that a packet is for; ``None`` if it is not of IPv4."""
    return packet[19] - 1 if len(packet) >= 20 and packet[0] >> 4 == 4 else None


def _tuns(namespaces: Sequence[str]) -> list[int]:
    """A TUN device in each namespace; this process ends up where it was."""
    tuns = []
    with Path("/proc/self/ns/net").open() as here:
        for namespace in namespaces:
            with (_NETNS / namespace).open() as there:
                _enter(there.fileno())
            tun = os.open("/dev/net/tun", os.O_RDWR)
            asked = struct.pack("16sH22x", _INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI)
            fcntl.ioctl(tun, _TUNSETIFF, asked)
            tuns.append(tun)
        _enter(here.fileno())
    return tuns


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    forward(sys.argv[1:])
