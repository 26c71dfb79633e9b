"""The meeting point of a launcher's ranks, once for each run that their processes make."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from unipar.errors import ConfigError, first_few
from unipar.world.network import (
    Arrival,
    allow_connections,
    arrive,
    choose_interface,
    meeting_of,
    some_of_each,
)
from unipar.world.placement import Placement
from unipar.world.waits import QUIET, await_name, host_of, told_of

log = logging.getLogger("unipar")

_NAMED = 16
"""Ranks that never came, as many as a message names."""

_PATIENCE = 10.0
"""Seconds that others get to find out who never came."""

_REFUSED = 5.0
"""Seconds that rank 0 keeps the store, at most, until all ranks know why they end."""


@dataclass
class _Place:
    """A launcher's meeting point, as this process knows it."""

    address: tuple[Any, ...]
    store: Store
    number: int = 0
    """How many meetings this process has come to."""


_place: _Place | None = None


def meet(placement: Placement) -> Store:
    """Wait for all ranks, and return a store that no earlier meeting of theirs has written to.

    A launcher's store outlives a process group, and torch would find the addresses that the
    group before has left in it: a rank then connects to a peer that has gone. So a meeting has
    a prefix of its own. The store itself is kept for the next meeting, for the rank that serves
    it must not close it while another one is already coming back.

    What each of them tells there is compared, and the network interface to the others is chosen by
    it, which torch's groups take from the environment.

    Args:
        placement: where this process stands; its world has more than one process.

    Raises:
        ConfigError: the ranks have different versions of Python, torch or unipar, or are more
            than a process of this host may have connections.
        torch.distributed.DistStoreError: a rank has not come within ``placement.timeout``.
    """
    allow_connections(placement.size)
    place = _find(placement)
    place.number += 1
    come(place.store, placement, place.number)
    return PrefixStore(f"unipar/{place.number}", place.store)


def come(store: Store, placement: Placement, number: int) -> None:
    """Wait at a store until all ranks have come to their meeting of that number.

    The last one to come reads what all of them have told, and tells them what follows from it: of
    each rank reading that of each other, the work of the store would grow with the square. Where
    one never comes, the first to have waited long enough looks who it is, and tells all, for whom
    the meeting has ended with that.

    Raises:
        ConfigError: the ranks have different versions of Python, torch or unipar.
        torch.distributed.DistStoreError: a rank has not come within ``placement.timeout``.
    """
    timeout = timedelta(seconds=placement.timeout)
    store.set_timeout(timeout)
    meeting = meeting_of(store)
    here = arrive(meeting)
    store.set(f"unipar/at/{placement.rank}", str(number))
    came, told = f"unipar/{number}/came", f"unipar/{number}/told"
    store.set(f"{came}/{placement.rank}", json.dumps(asdict(here)))
    if store.add(came, 1) == placement.size:
        words = store.multi_get([f"{came}/{rank}" for rank in range(placement.size)])
        arrivals = [Arrival(**json.loads(word)) for word in words]
        few = [asdict(one) for one in some_of_each(arrivals)]
        _tell(store, told, refused=_different_versions(arrivals), few=few)
    try:
        if placement.rank == 0 and placement.timeout > QUIET:
            _tell_who_is_late(store, told, came, placement)
        store.wait([told], timeout)
    except RuntimeError:  # A store in a file raises no more than that.
        if store.add(f"unipar/{number}/late", 1) == 1:
            missing = _missing(store, came, placement.size)
            if missing:
                _tell(store, told, late=_late(placement, store, number, missing), missing=missing)
        store.wait([told], timedelta(seconds=_PATIENCE))
    said = json.loads(store.get(told))
    missing = said.get("missing", [])
    if said.get("refused") or missing:
        here_too = [rank for rank in range(placement.size) if rank not in set(missing)]
        _leave_together(placement, store, number, here_too)
        if missing:
            raise dist.DistStoreError(said["late"])
        raise ConfigError(said["refused"])
    others = [Arrival(**one) for one in said["few"]]
    choose_interface(here, others, meeting[1] if meeting else 0, main=placement.rank == 0)


def _tell_who_is_late(store: Store, told: str, came: str, placement: Placement) -> None:
    """Wait for a while, and say of whom this is; nothing if all come."""
    try:
        store.wait([told], timedelta(seconds=QUIET))
    except RuntimeError:
        missing = _missing(store, came, placement.size)
        if missing:
            log.warning(
                "of %d ranks %s not come in %g s. The others wait for up to %g s.",
                placement.size,
                f"rank {missing[0]} has"
                if len(missing) == 1
                else f"ranks {first_few([*map(str, missing)], _NAMED)} have",
                QUIET,
                placement.timeout,
            )


def _missing(store: Store, came: str, size: int) -> list[int]:
    """The ranks that have not come."""
    return [rank for rank in range(size) if not store.check([f"{came}/{rank}"])]


def _tell(store: Store, key: str, **what: Any) -> None:
    """Say how the meeting ends, unless another rank has said it."""
    store.compare_set(key, "", json.dumps(what))


def _find(placement: Placement) -> _Place:
    global _place
    method = placement.init_method
    assert method is not None
    address = (method, placement.restart)
    if method == "env://":
        address = (*address, os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT"))
    if _place is None or _place.address != address:
        _place = _Place(address, _reach(method, placement))
    return _place


def _reach(method: str, placement: Placement) -> Store:
    """Wait for the store that rank 0 keeps."""
    timeout = timedelta(seconds=placement.timeout)
    found = rendezvous(method, placement.rank, placement.size, timeout=timeout)
    where = host_of(method)
    if where is None:
        return next(iter(found))[0]
    host, port = where
    await_name(host, placement.timeout)
    address = f"{host}, port {port}"
    if placement.rank:
        unmet = f"rank {placement.rank} of {placement.size} has not reached rank 0 at {address},"
        remedy = (
            "Rank 0 may not have started; if it has, look whether MASTER_ADDR is its host and "
            "MASTER_PORT its port, and whether a firewall lets them through."
        )
    else:
        unmet = f"rank 0 waits at {address}, and has not heard from all {placement.size} ranks"
        remedy = (
            "Start the others with the same MASTER_ADDR and MASTER_PORT, and look whether a "
            "firewall keeps them away."
        )
    limit = f"{placement.timeout:g} s"
    try:
        with told_of(f"{unmet} in {QUIET:g} s; it waits for up to {limit}. {remedy}"):
            return next(iter(found))[0]
    except dist.DistError as error:
        said = str(error).partition("\n")[0].rstrip(".")
        if placement.rank == 0 and not isinstance(error, dist.DistStoreError):
            raise dist.DistNetworkError(
                f"rank 0 cannot serve the others at {address} ({said}). Set MASTER_ADDR to its own "
                "host and MASTER_PORT to a port that is free there, for all processes alike."
            ) from error
        raise dist.DistStoreError(f"{unmet} within {limit} ({said}). {remedy}") from error


def _different_versions(arrivals: Sequence[Arrival]) -> str | None:
    """What differs between hosts, or ``None``."""
    lines = []
    for name in arrivals[0].versions:
        found: dict[str, dict[str, list[str]]] = {}
        for rank, one in enumerate(arrivals):
            hosts = found.setdefault(one.versions.get(name, "unknown"), {})
            hosts.setdefault(one.host, []).append(str(rank))
        if len(found) > 1:
            told = "; ".join(
                f"{version} on "
                + ", ".join(f"{host} (rank {', '.join(own)})" for host, own in hosts.items())
                for version, hosts in found.items()
            )
            lines.append(f"  {name}: {told}")
    if not lines:
        return None
    return (
        "the ranks of this run have different versions:\n"
        + "\n".join(lines)
        + "\nInstall the same ones on every host, or start the ranks by the interpreter of one "
        "environment that all of them share."
    )


def _leave_together(placement: Placement, store: Store, number: int, ranks: Sequence[int]) -> None:
    """Let every one of these ranks read why before the one that keeps the store is gone."""
    read = f"unipar/{number}/read"
    with contextlib.suppress(RuntimeError):
        store.set(f"{read}/{placement.rank}", "")
        if placement.rank == 0:
            keys = [f"{read}/{rank}" for rank in ranks]
            store.wait(keys, timedelta(seconds=min(_REFUSED, placement.timeout)))


@atexit.register
def _leave() -> None:
    """Close the store; the last rank removes its file, where it is one."""
    global _place
    _place = None


def _late(placement: Placement, store: Store, number: int, missing: list[int]) -> str:
    lines = [
        f"timed out after {placement.timeout:g} s: rank {placement.rank} of {placement.size} "
        f"waited for the others to begin run {number} of these processes."
    ]
    for rank in missing[:_NAMED]:
        key = f"unipar/at/{rank}"
        at = int(store.get(key)) if store.check([key]) else 0
        where = f"has begun {at} of them" if at else "has begun none"
        lines.append(f"Rank {rank} {where}.")
    if len(missing) > _NAMED:
        lines.append(f"So it is with {len(missing) - _NAMED} more.")
    lines.append(
        "Every rank must call fit (or enter a Session) equally often and in the same order, also "
        "after a run that failed on some ranks only. If a rank was only slow, raise `timeout`."
    )
    return " ".join(lines)
