"""The meeting point of a launcher's ranks, once for each run that their processes make."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.rendezvous import rendezvous

from unipar.world.placement import Placement


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

    Args:
        placement: where this process stands; its world has more than one process.

    Raises:
        torch.distributed.DistStoreError: a rank has not come within ``placement.timeout``.
    """
    place = _find(placement)
    place.number += 1
    come(place.store, placement, place.number)
    return PrefixStore(f"unipar/{place.number}", place.store)


def come(store: Store, placement: Placement, number: int) -> None:
    """Wait at a store until all ranks have come to their meeting of that number.

    Raises:
        torch.distributed.DistStoreError: a rank has not come within ``placement.timeout``.
    """
    timeout = timedelta(seconds=placement.timeout)
    store.set_timeout(timeout)
    store.set(f"unipar/at/{placement.rank}", str(number))
    came = f"unipar/{number}/came"
    store.set(f"{came}/{placement.rank}", "here")
    # One key to wait for: for one of each rank, the work of the store would grow with the square.
    complete = f"unipar/{number}/complete"
    if store.add(came, 1) == placement.size:
        store.set(complete, "yes")
    try:
        store.wait([complete], timeout)
    except RuntimeError as error:  # A store in a file raises no more than that.
        missing = [r for r in range(placement.size) if not store.check([f"{came}/{r}"])]
        if not missing:
            raise
        raise dist.DistStoreError(_told(placement, store, number, missing)) from error


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


@atexit.register
def _leave() -> None:
    """Close the store; the last rank removes its file, where it is one."""
    global _place
    _place = None


def _told(placement: Placement, store: Store, number: int, missing: list[int]) -> str:
    lines = [
        f"timed out after {placement.timeout:g} s: rank {placement.rank} of {placement.size} "
        f"waited for the others to begin run {number} of these processes."
    ]
    for rank in missing:
        key = f"unipar/at/{rank}"
        at = int(store.get(key)) if store.check([key]) else 0
        where = f"has begun {at} of them" if at else "has begun none"
        lines.append(f"Rank {rank} {where}.")
    lines.append(
        "Every rank must call fit (or enter a Session) equally often and in the same order, also "
        "after a run that failed on some ranks only. If a rank was only slow, raise `timeout`."
    )
    return " ".join(lines)
