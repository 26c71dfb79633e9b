"""Where the ranks of a launcher meet, once for each run that their processes make."""

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
    timeout = timedelta(seconds=placement.timeout)
    place.store.set_timeout(timeout)
    place.store.set(f"unipar/at/{placement.rank}", str(place.number))
    keys = [f"unipar/{place.number}/came/{rank}" for rank in range(placement.size)]
    place.store.set(keys[placement.rank], "here")
    try:
        place.store.wait(keys, timeout)
    except RuntimeError as error:  # A store in a file raises no more than that.
        missing = [rank for rank, key in enumerate(keys) if not place.store.check([key])]
        if not missing:
            raise
        raise dist.DistStoreError(_told(placement, place, missing)) from error
    return PrefixStore(f"unipar/{place.number}", place.store)


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


def _told(placement: Placement, place: _Place, missing: list[int]) -> str:
    lines = [
        f"timed out after {placement.timeout:g} s: rank {placement.rank} of {placement.size} "
        f"waited for the others to begin run {place.number} of these processes."
    ]
    for rank in missing:
        key = f"unipar/at/{rank}"
        at = int(place.store.get(key)) if place.store.check([key]) else 0
        where = f"has begun {at} of them" if at else "has begun none"
        lines.append(f"Rank {rank} {where}.")
    lines.append(
        "Every rank must call fit (or enter a Session) equally often and in the same order, also "
        "after a run that failed on some ranks only. If a rank was only slow, raise `timeout`."
    )
    return " ".join(lines)
