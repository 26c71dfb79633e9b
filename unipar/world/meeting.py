"""The meeting point of a launcher's ranks, once for each run that their processes make."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from unipar.errors import ConfigError
from unipar.world.network import (
    Arrival,
    allow_connections,
    arrive,
    choose_interface,
    meeting_of,
    some_of_each,
)
from unipar.world.placement import Placement

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
        store.wait([told], timeout)
    except RuntimeError:  # A store in a file raises no more than that.
        if store.add(f"unipar/{number}/late", 1) == 1:
            missing = [r for r in range(placement.size) if not store.check([f"{came}/{r}"])]
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
        timeout = timedelta(seconds=placement.timeout)
        found = rendezvous(method, placement.rank, placement.size, timeout=timeout)
        store, _, _ = next(iter(found))
        _place = _Place(address, store)
    return _place


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
