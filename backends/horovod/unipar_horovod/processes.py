"""Joining Horovod's processes, whoever started them."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from unipar.errors import ConfigError
from unipar.utils.environ import environ
from unipar.utils.logs import quiet_framework
from unipar.world import Placement, World
from unipar_horovod import installed

if TYPE_CHECKING:
    from horovod.torch import ProcessSet  # pyright: ignore[reportMissingImports]

_sets: dict[tuple[int, ...], Any] = {}
_history: set[str] = set()
"""What earlier starts of Horovod in this process have left behind in it."""


def process_set(ranks: Sequence[int]) -> ProcessSet:
    """The process set of these ranks, for collectives of one's own within a run.

    Raises:
        ConfigError: the run's option ``process_sets`` does not name these ranks.
    """
    key = tuple(sorted(ranks))
    if key not in _sets:
        known = ", ".join(str(list(ranks)) for ranks in _sets) or "none"
        raise ConfigError(
            f"this run has no process set of ranks {list(key)}; it has: {known}. "
            "Name it in the strategy's options: HorovodOptions(process_sets=[[0, 1], …])."
        )
    return _sets[key]


def import_horovod() -> Any:
    """``horovod.torch``, or the reason why it cannot be used.

    Raises:
        ConfigError: it is installed and broken.
    """
    with quiet_framework():
        try:
            import horovod.torch as hvd  # pyright: ignore[reportMissingImports]
        except Exception as error:
            raise _broken(error) from error
    # Horovod 0.28.1, horovod/torch/__init__.py.
    if not hvd._MPI_LIB_AVAILABLE:
        # Horovod prints why its library does not load, and goes on without it.
        try:
            pass
        except Exception as error:
            raise _broken(error) from error
    return hvd


def _broken(error: Exception) -> ConfigError:
    text = str(error).strip().splitlines()
    return ConfigError(
        f"Horovod is installed, and does not load: {type(error).__name__}: "
        f"{text[0][:300] if text else ''} It was probably built for another torch or Python. "
        "Build it again: unipar install horovod --force"
    )


def start(
    world: World, settings: Mapping[str, str], sets: Sequence[Sequence[int]], transport: str
) -> None:
    """Join all processes of ``world`` in Horovod. Collective.

    Args:
        world: the processes, already joined by ``torch.distributed``.
        settings: Horovod's own environment variables; left as they were when this returns.
        sets: ranks of the process sets to make.
        transport: ``"gloo"`` or ``"mpi"``.

    Raises:
        ConfigError: Horovod is broken, or cannot start again in this process.
    """
    hvd = import_horovod()
    _check_again(settings, transport)
    made = [hvd.ProcessSet(list(ranks)) for ranks in sets]
    with _meeting_point(world, transport) as where, _environment({**where, **settings}):
        hvd.init(process_sets=made)
        # The meeting point must last until every rank has been there.
        world.barrier()
    _sets.update({tuple(one.ranks): one for one in made})


def _check_again(settings: Mapping[str, str], transport: str) -> None:
    """Refuse what would crash in a process in which Horovod has been started before."""
    if "tuned" in _history and not installed.starts_again():
        raise ConfigError(
            "Horovod was started in this process with a fusion threshold or a cycle time, and this "
            "build of it crashes when it then starts again. Start a new process, or get a build "
            "without the fault: unipar install horovod --force"
        )
    if "mpi" in _history:
        raise ConfigError(
            "Horovod was started in this process with transport='mpi', and MPI starts only once in "
            "a process. Start a new one, or leave the transport out."
        )
    if {"HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME"} & settings.keys():
        _history.add("tuned")
    if transport == "mpi":
        _history.add("mpi")


def stop() -> None:
    """Leave Horovod; collective, unless an error is on its way out."""
    hvd = sys.modules.get("horovod.torch")
    if hvd is None or not hvd.is_initialized():
        return
    if sys.exc_info()[0] is None:
        # The first to leave would end the collectives of those that are still at work.
        hvd.barrier()
    _sets.clear()
    hvd.shutdown()


@contextlib.contextmanager
def _meeting_point(world: World, transport: str) -> Iterator[dict[str, str]]:
    """Horovod's variables for where this process stands, and for where they meet.

    Rank 0 serves as the meeting point, as ``horovodrun`` would.
    """
    placement = world.placement
    # Ranks of the same number on every node; nodes may differ in their number of ranks.
    column = [
        node
        for node, local_rank in world.gather((placement.node_rank, placement.local_rank))
        if local_rank == placement.local_rank
    ]
    variables = {
        "HOROVOD_RANK": placement.rank,
        "HOROVOD_SIZE": placement.size,
        "HOROVOD_LOCAL_RANK": placement.local_rank,
        "HOROVOD_LOCAL_SIZE": placement.local_size,
        "HOROVOD_CROSS_RANK": sorted(column).index(placement.node_rank),
        "HOROVOD_CROSS_SIZE": len(column),
        "HOROVOD_HOSTNAME": f"node{placement.node_rank}",
        "HOROVOD_CONTROLLER": transport,
        "HOROVOD_CPU_OPERATIONS": transport,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": max(1, round(placement.timeout)),
    }
    if placement.num_nodes == 1 and sys.platform == "linux":
        variables["HOROVOD_GLOO_IFACE"] = "lo"
    elif "GLOO_SOCKET_IFNAME" in os.environ:
        variables["HOROVOD_GLOO_IFACE"] = os.environ["GLOO_SOCKET_IFNAME"]
    with contextlib.ExitStack() as stack:
        if world.size > 1 and transport == "gloo":
            address = None
            if world.is_main:
                address = stack.enter_context(_server(_host(placement)))
            host, port = world.broadcast(address)
            variables["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = host
            variables["HOROVOD_GLOO_RENDEZVOUS_PORT"] = port
        yield {name: str(value) for name, value in variables.items()}


def _host(placement: Placement) -> str:
    """The address of rank 0, as the other nodes know it."""
    if placement.num_nodes == 1:
        return "127.0.0.1"
    where = urlsplit(placement.init_method or "")
    host = where.hostname if where.scheme == "tcp" else os.environ.get("MASTER_ADDR")
    return socket.gethostbyname(host or socket.gethostname())


@contextlib.contextmanager
def _server(host: str) -> Iterator[tuple[str, int]]:
    """Horovod's store of addresses, for the length of the block."""
    import threading

    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer  # pyright: ignore[reportMissingImports]

    # Horovod's own starter listens on every interface, on a port that others may guess.
    server = RendezvousHTTPServer((host, 0), RendezvousHandler, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield host, server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables, and nothing else of Horovod's launcher, for the length of the block."""
    foreign = {name for name in os.environ if name.startswith(_LAUNCHER)}
    with environ({**dict.fromkeys(foreign), **variables}):
        yield


_LAUNCHER = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_",
    "HOROVOD_CROSS_",
    "HOROVOD_HOSTNAME",
    "HOROVOD_GLOO_RENDEZVOUS_",
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
)
