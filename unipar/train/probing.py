"""Trying what may fail on one rank alone, in the middle of a pass that ranks compute together.

A rank that has run out of memory leaves the others in a collective that it will not come to. They
can go on together only if each of them has taken part in the same collectives by then, which is
counted, and told through the run's store beside the pass.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from unipar.errors import ConfigError
from unipar.world import World

_POLL, _PATIENCE = 0.1, 60.0
# Between two looks at whether a rank has failed, of which every rank takes many.
_LOOK = 0.25


def fits_on_all(world: World, attempt: Callable[[], bool], size: int) -> bool:
    """Try something on every rank. Collective.

    Args:
        world: the joined processes.
        attempt: returns whether it fits on this rank; other ranks may not come to its end.
        size: the micro-batch size that is tried, for the message.

    Raises:
        ConfigError: it does not fit on this rank, and others wait for it in a collective.
    """
    if world.size == 1 or not dist.is_initialized():
        return all(world.gather(attempt()))
    # torch 2.13, distributed/distributed_c10d.py; nothing public gives the store of the group.
    store: Any = dist.distributed_c10d._get_default_store()
    store = store.clone()
    store.set_timeout(timedelta(seconds=world.placement.timeout))
    told = _Told(world, store)
    with told.telling():
        fits = attempt()
    told.tell(_Place(counts(), fits))
    if not fits:
        told.await_the_others(size)
    return all(world.gather(fits))


@dataclass(frozen=True)
class _Place:
    """Where a rank is.

    Attributes:
        counts: collectives that it has begun, by group.
        fits: whether it fitted; ``None``: it has not come to the end yet.
    """

    counts: dict[str, int]
    fits: bool | None = None

    def is_ahead_of(self, other: _Place) -> bool:
        return any(self.counts[n] > other.counts[n] for n in self.counts if n in other.counts)


class _Told:
    """What ranks tell each other of where they are in one attempt."""

    def __init__(self, world: World, store: Any) -> None:
        self._rank, self._size, self._store = world.rank, world.size, store
        self._patience = min(_PATIENCE, world.placement.timeout)
        # All ranks have come through the same collectives until now, and no other attempt so far.
        begun = sum(_counts_of(dist.group.WORLD))
        self._key = f"unipar/attempt/{world.placement.restart}/{begun}"
        self._ended = threading.Event()

    def tell(self, place: _Place) -> None:
        self._store.set(f"{self._key}/{self._rank}", json.dumps(asdict(place)))
        if place.fits is False:
            self._store.set(f"{self._key}/failed", "")

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell where this rank is, as soon as another has failed."""
        thread = threading.Thread(target=self._go_on, name="unipar-attempt", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _go_on(self) -> None:
        while not self._ended.wait(_LOOK):
            try:
                if self._store.check([f"{self._key}/failed"]):
                    self.tell(_Place(counts()))
            except dist.DistError:
                # The run has ended.
                return

    def await_the_others(self, size: int) -> None:
        """Return when all have come to the end at the same place.

        Raises:
            ConfigError: they have not, and will not.
        """
        own, deadline = _Place(counts(), False), time.monotonic() + self._patience
        while time.monotonic() < deadline:
            others = self._read()
            apart = [p for p in others.values() if p.is_ahead_of(own)]
            apart += [p for p in others.values() if p.fits is not None and own.is_ahead_of(p)]
            if apart:
                break
            if len(others) == self._size - 1 and all(p.fits is not None for p in others.values()):
                return
            time.sleep(_POLL)
        fewer = f"{size // 2}, say" if size > 1 else "1, with a smaller or a divided model"
        raise ConfigError(
            f"micro_batch_size='auto': rank {self._rank} ran out of memory trying {size}, "
            "and others did not, or not at the same place. Under this strategy ranks exchange data "
            "within a pass, so they wait for that rank and cannot try fewer samples with it. Set "
            f"micro_batch_size to a number that fits on rank {self._rank} ({fewer}), or see what "
            "else takes memory on its device."
        )

    def _read(self) -> dict[int, _Place]:
        keys = {r: f"{self._key}/{r}" for r in range(self._size) if r != self._rank}
        there = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {r: _Place(**json.loads(self._store.get(key))) for r, key in there.items()}


def counts() -> dict[str, int]:
    """How many collectives this process has begun, by group and device."""
    # torch 2.13, distributed/distributed_c10d.py, _World.pg_map; nothing public has all groups.
    groups = list(dist.distributed_c10d._world.pg_map)
    return {
        f"{group.group_name} {number}": count
        for group in groups
        for number, count in enumerate(_counts_of(group))
    }


def _counts_of(group: Any) -> list[int]:
    # torch 2.13, distributed/distributed_c10d.py: a group has a backend for each kind of device.
    kinds = sorted(device.type for device in group._device_types)
    backends = {id(b): b for b in (group._get_backend(torch.device(kind)) for kind in kinds)}
    return [backend._get_sequence_number_for_group() for backend in backends.values()]
