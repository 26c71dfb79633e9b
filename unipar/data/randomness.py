"""Generators of random numbers that a process has one of: whose they are."""

from __future__ import annotations

import pickle
import random
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand

from unipar.world import World


def draw_alike(world: World) -> None:
    """Let ranks that hold parts of the same layers draw the same from ``random`` and NumPy.

    Each takes the state of the first of them, which stays as its process or its user has seeded it.
    Collective.
    """
    streams = [world.layout.stream(rank) for rank in range(world.size)]
    if len(set(streams)) == world.size:
        return
    states = world.gather((random.getstate(), np.random.get_state(legacy=False)))
    python, numpy = states[streams.index(streams[world.rank])]
    random.setstate(python)
    np.random.set_state(numpy)


class OwnRandomness:
    """Random numbers that a piece of code has for itself.

    Within ``with``, Python's, NumPy's and torch's CPU generators are this object's alone.

    They begin at ``seed``, go on at each ``with`` where the last one ended, and the process's own
    generators are afterwards as they were. (Only the second of a pair of normal deviates, which
    NumPy's old functions keep in hand, is drawn again on either side.)
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own = (
            random.Random(seed).getstate(),
            # The kind that numpy.random has by default, and numpy.random.seed() can seed.
            np.random.MT19937(seed),
            torch.Generator().manual_seed(seed).get_state(),
        )
        self._outer: Any = None

    def __enter__(self) -> None:
        self._outer = _exchange(self._own)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._own = _exchange(self._outer)

    @property
    def drawn(self) -> bool:
        """Whether any was drawn."""
        (python, numpy, torchs), (first, second, third) = self._own, OwnRandomness(self._seed)._own
        return (
            python != first
            or pickle.dumps(numpy.state) != pickle.dumps(second.state)
            or not torch.equal(torchs, third)
        )


def _exchange(given: tuple[Any, Any, torch.Tensor]) -> tuple[Any, Any, torch.Tensor]:
    # NumPy's generator is exchanged whole: its state takes a hundred times longer to copy.
    taken = random.getstate(), mtrand.get_bit_generator(), torch.get_rng_state()
    random.setstate(given[0])
    mtrand.set_bit_generator(given[1])
    torch.set_rng_state(given[2])
    return taken
