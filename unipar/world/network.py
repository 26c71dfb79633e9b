"""The network interface by which the processes of a run reach each other.

gloo takes the address that the host's name leads to, which is the loopback on many installations,
and NCCL the first interface that it finds. The one that leads to the run's meeting point is one by
which all hosts can be reached.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
)

from unipar.errors import ConfigError
from unipar.utils.version import own_versions

log = logging.getLogger("unipar")

# NCCL would take a name for the beginning of others without the sign of equality.
# https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
VARIABLES = {
    "GLOO_SOCKET_IFNAME": "{}",
    "TP_SOCKET_IFNAME": "{}",
    "NCCL_SOCKET_IFNAME": "={}",
}
"""What names an interface to a library, and how; of those that are set none is changed."""

_GROUPS = 4
"""Groups of all ranks that a run has at once, the connections to the store among them."""

_OTHER_FILES = 512
"""What else a process has open: data, checkpoints, devices, pipes to workers."""

_chosen: dict[str, str] = {}
"""What this process has set itself, for an earlier run."""


@dataclass(frozen=True)
class Arrival:
    """What a rank tells the others when it comes to the meeting point.

    Attributes:
        host: its host's name.
        network: the same for processes that share a loopback interface.
        address: its host's address on the way to the meeting point; empty where that is a file.
        versions: by name, of what has to be the same on all ranks.
    """

    host: str
    network: str
    address: str
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def near(self) -> bool:
        """Whether the meeting point is on its own host."""
        return bool(self.address) and ipaddress.ip_address(self.address).is_loopback


def arrive(meeting: tuple[str, int] | None) -> Arrival:
    """This process's own, with ``meeting`` as :func:`meeting_of` gives it."""
    address = address_towards(meeting) if meeting else ""
    return Arrival(socket.gethostname(), _network(), address, own_versions())


def meeting_of(store: Any) -> tuple[str, int] | None:
    """Host and port of a store of torch's, or ``None`` where it is a file."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return (store.host, store.port) if isinstance(store, TCPStore) else None


def address_towards(meeting: tuple[str, int]) -> str:
    """This host's address on the way to a host and port; nothing is sent.

    Raises:
        OSError: the name is not known, or no way leads there.
    """
    host, port = meeting
    last: OSError | None = None
    # A name may have addresses of a family that this host has no way to.
    for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind) as probe:
                probe.connect(address)
                return _bare(probe.getsockname()[0])
        except OSError as error:
            last = error
    assert last is not None
    raise last


def allow_connections(ranks: int) -> None:
    """Let this process open as many files as its connections to so many ranks need.

    The store that rank 0 keeps and each group of gloo hold a connection to every rank, and many
    systems let a process open 1,024 files as long as it asks for no more.

    Raises:
        ConfigError: it may not ask for one to each rank.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit.
        return
    soft, hard = (
        sys.maxsize if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if hard < ranks:
        raise ConfigError(
            f"{ranks} ranks need as many connections of one process, which may open {hard} files "
            f"on {socket.gethostname()}. Raise the hard limit there: `ulimit -Hn`, LimitNOFILE of "
            "systemd (of Slurm's slurmd too), or --ulimit nofile of a container."
        )
    wanted = min(hard, _GROUPS * ranks + _OTHER_FILES)
    if soft < wanted:
        # macOS has a limit of its own below an endless one.
        with contextlib.suppress(OSError, ValueError):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limit))


def interface_with(address: str) -> str | None:
    """The name of this host's interface that has an address."""
    for name, its in psutil.net_if_addrs().items():
        families = (socket.AF_INET, socket.AF_INET6)
        if any(_bare(one.address) == address for one in its if one.family in families):
            return name
    return None


def some_of_each(arrivals: Sequence[Arrival]) -> list[Arrival]:
    """As few of them as :func:`choose_interface` needs: of two networks, and not only near ones."""
    first = arrivals[0]
    another = next((one for one in arrivals if one.network != first.network), None)
    away = next((one for one in arrivals if one.address and not one.near), None)
    return [one for one in (first, another, away) if one is not None]


def choose_interface(here: Arrival, others: Sequence[Arrival], port: int, *, main: bool) -> None:
    """Let gloo and NCCL use the interface that leads to the other hosts.

    The user's own choice, by a variable of :data:`VARIABLES`, stays. What is set here stays set,
    for groups that are made later.

    Args:
        here: this process's own.
        others: :func:`some_of_each` of all ranks.
        port: of the meeting point.
        main: whether this is rank 0, which says so.
    """
    if all(one.network == here.network for one in others):
        if sys.platform == "linux":
            # NCCL finds shared memory and the links between GPUs by itself.
            _set("lo", ["GLOO_SOCKET_IFNAME"])
        return
    address = _way_out(here, others, port)
    name = interface_with(address) if address else None
    given = [f"{one}={os.environ[one]}" for one in VARIABLES if _by_user(one)]
    if name is None:
        if not _by_user("GLOO_SOCKET_IFNAME"):
            log.warning(
                "the interface of %s that leads to the other hosts cannot be told%s; gloo and NCCL "
                "choose one. If ranks do not find each other, set GLOO_SOCKET_IFNAME and "
                "NCCL_SOCKET_IFNAME.",
                *(here.host, f" (its address is {address})" if address else ""),
            )
        return
    _set(name, VARIABLES)
    if main:
        log.info(
            "network: %s (%s) leads to the other hosts; %s",
            *(name, address),
            f"set by the user: {', '.join(given)}"
            if given
            else "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME choose another interface",
        )


def _way_out(here: Arrival, others: Sequence[Arrival], port: int) -> str:
    """This host's address towards the others, or an empty string."""
    if not here.near:
        return here.address
    # The meeting point is on this host, and the way there ends at it: such as where the host's name
    # leads to 127.0.1.1, as Debian sets it up.
    for other in others:
        if other.network != here.network and other.address and not other.near:
            with contextlib.suppress(OSError):
                return address_towards((other.address, port))
    return ""


def _by_user(name: str) -> bool:
    return os.environ.get(name, _chosen.get(name)) != _chosen.get(name)


def _set(interface: str, names: Sequence[str] | dict[str, str]) -> None:
    for name in names:
        if not _by_user(name):
            os.environ[name] = _chosen[name] = VARIABLES[name].format(interface)


def _network() -> str:
    told = [socket.gethostname()]
    # Other systems than Linux have one loopback for a host.
    with contextlib.suppress(OSError):
        told.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        told.append(str(os.stat("/proc/self/ns/net").st_ino))
    return "/".join(told)


def _bare(address: str) -> str:
    """An address without the zone that one of a single link has."""
    return address.partition("%")[0]
