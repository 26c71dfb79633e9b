"""Random numbers of ranks: those of rank 0 where a script seeds nothing, or others on each."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from unipar.engine.trials import (
    digest,
    host_generators,
    set_host_generators,
    set_torch_generators,
    torch_generators,
)
from unipar.world import Placement, World

_WORDS, _BLOCKS = 624, 256
"""Words of a Mersenne twister, and how often all of them may have been used."""
_WAIT = timedelta(minutes=10)
"""How long rank 0 may take to import what stands before the face."""


class CommonDraws:
    """Gives a process the generators of rank 0, as they are when the face is imported.

    What a script draws of them from then on is alike on all ranks, as the split of a dataset. The
    processes have not joined yet, so torchrun's store hands them on; other launchers have none, and
    there a script has to seed.

    Args:
        placement: where this process stands.
    """

    def __init__(self, placement: Placement) -> None:
        self._own = self._given = _states()
        # torch 2.13, distributed/rendezvous.py: set where torchrun's agent keeps the store.
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return
        with contextlib.suppress(RuntimeError, KeyError, ValueError):
            store: Any = TCPStore(
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                wait_for_workers=False, timeout=_WAIT,
            )  # fmt: skip
            key = f"unipar/generators/{placement.restart}"
            if placement.rank == 0:
                store.set(key, pickle.dumps(self._own))
            else:
                self._given = pickle.loads(store.get(key))
            _set_states(self._given)

    def give_back(self) -> None:
        """Let a script with ranks of its own draw others on each, of what it has not seeded."""
        if self._own is self._given:
            return
        host = host_generators()
        if torch.initial_seed() == self._given[0]:
            _set_states((*self._own[:2], host))
        pairs = zip(self._own[2], self._given[2], host, strict=True)
        set_host_generators(
            tuple(own if _is_of(now, given) else now for own, given, now in pairs)  # pyright: ignore
        )


@contextlib.contextmanager
def drawing_apart(world: World, before: list[torch.Tensor]) -> Iterator[list[bool]]:
    """Other random numbers on each rank within, and the same on all after it.

    Args:
        world: the joined processes.
        before: the states of torch's generators, the same on all ranks.

    Yields:
        Something once it has ended, if any were drawn.
    """
    drawn = list[bool]()
    seed = int(digest([one.numpy() for one in before])[:12], 16)
    if world.data_rank:
        # The first keeps the stream of the script.
        torch.manual_seed(seed + world.data_rank)
    began = torch_generators(world.device)
    try:
        yield drawn
    finally:
        now = torch_generators(world.device)
        if any(not torch.equal(one, other) for one, other in zip(now, began, strict=True)):
            drawn.append(True)
            torch.manual_seed(seed)
        elif world.data_rank:
            set_torch_generators(before, world.device)


def _is_of(now: Any, given: Any) -> bool:
    """Whether a generator of Python's or NumPy's was not seeded since, and has drawn little.

    Both are Mersenne twisters: their words are others once all were used, or they are seeded.
    """
    if not isinstance(now, dict):
        python = random.Random()
        python.setstate(given)
        for _ in range(_BLOCKS):
            if python.getstate()[1][:-1] == now[1][:-1]:
                return True
            python.getrandbits(32 * _WORDS)
        return False
    if now["bit_generator"] != given["bit_generator"] or now["bit_generator"] != "MT19937":
        return False
    numpy = np.random.MT19937()
    numpy.state = {"bit_generator": "MT19937", "state": given["state"]}
    for _ in range(_BLOCKS):
        if np.array_equal(numpy.state["state"]["key"], now["state"]["key"]):
            return True
        numpy.random_raw(_WORDS)
    return False


def _states() -> tuple[int, Any, Any]:
    return torch.initial_seed(), torch.get_rng_state(), host_generators()


def _set_states(states: tuple[int, Any, Any]) -> None:
    seed, own, host = states
    torch.set_rng_state(own)
    # Those of GPUs have no seed of their own that could be known before they are used.
    torch.cuda.manual_seed_all(seed)
    set_host_generators(host)
