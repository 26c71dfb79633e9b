"""Ranks that keep the others waiting, found by when each comes to the reduction of the loss."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

from unipar.world import Flag, Gathering, World

log = logging.getLogger("unipar")

FACTOR, STEPS = 1.5, 20
LEAST = 1e-3
"""Seconds behind the median that are too few to be worth a line."""
EVERY = 10.0
"""Seconds from one look to the next."""


class Stragglers:
    """Names ranks that are slow in many steps in a row, once, and again when they have recovered.

    A rank's own time in a step is that from the end of its last step to when it begins to reduce
    the loss, before its last backward pass: what it loads and computes before it waits for others.
    It is taken on the host, and no device is waited for. A rank is slow whose own time is more than
    :data:`FACTOR` times the median of all, of an even number the lower one of the middle two, and
    :data:`LEAST` more than it, in :data:`STEPS` steps in a row; it has recovered when it was so in
    none of as many. Where forward passes exchange parts, ranks wait there for the one that is late,
    and all take as long; so its own time is held, too, against what it were had its batch come
    as early as the median. Every :data:`EVERY` seconds, by rank 0's clock, each rank sends its last
    times to rank 0, which looks at them in a later step: nobody waits for them.

    Ranks of a pipeline wait for one another before that, and are not compared.

    Args:
        world: the joined processes.
        hosts: the host name of each rank.
        note: called on rank 0 with ``"slow"`` or ``"recovered"``, the rank and its host.
    """

    def __init__(
        self, world: World, hosts: Sequence[str], note: Callable[[str, int, str], None]
    ) -> None:
        self._world, self._hosts, self._note = world, hosts, note
        self._compares = world.size > 1 and world.layout.pp == 1
        self._times: deque[tuple[float, float]] = deque(maxlen=STEPS)
        self._began = self._loaded = 0.0
        self._looked = time.perf_counter()
        self._slow: set[int] = set()
        self._coming: Gathering | None = None

    def begin(self) -> None:
        """Note that this rank goes on to its next batch, and waits for nobody."""
        self._began = time.perf_counter()

    def loaded(self) -> None:
        """Note that this rank has its batch."""
        self._loaded = time.perf_counter()

    def end(self) -> None:
        """Note that a step was taken. Collective."""
        # The first step compiles, and begins before the ranks have met.
        if not self._compares or not self._began:
            return
        if self._coming is not None and self._coming.done():
            times, self._coming = self._coming.read(), None
            if times is not None:
                self.compare(times)
        reached = self._world.reduced_at
        self._times.append((self._loaded - self._began, reached - self._began))
        if self._world.is_main and self._coming is None and reached - self._looked >= EVERY:
            self._looked = reached
            # Clocks differ between ranks: the flag makes them gather after the same step.
            self._world.raise_flag(Flag.TIMES)
        if self._world.take_flag(Flag.TIMES) and len(self._times) == STEPS:
            own = torch.tensor(self._times, dtype=torch.float32, device="cpu")
            self._coming = self._world.start_gather(own)

    def compare(self, times: torch.Tensor) -> None:
        """Say who has become slow, or has recovered.

        Args:
            times: of each rank in each of the last steps, until it had its batch and in all, in
                seconds, as ``[rank, step, 2]``.
        """
        loaded, own = times.unbind(-1)
        # Of an even number the lower one of the middle two.
        late = (loaded - loaded.median(dim=0).values).clamp(min=0)
        others = torch.minimum(own.median(dim=0).values, own - late)
        behind = (own > FACTOR * others) & (own - others > LEAST)
        for rank in behind.all(dim=1).nonzero().flatten().tolist():
            if rank not in self._slow:
                self._slow.add(rank)
                self._say(rank, *(of[rank].median().item() for of in (own, others, late)))
        for rank in sorted(self._slow):
            if not behind[rank].any():
                self._slow.remove(rank)
                log.warning("rank %d on %s is as fast as the others again", rank, self._hosts[rank])
                self._note("recovered", rank, self._hosts[rank])

    def _say(self, rank: int, own: float, others: float, late: float) -> None:
        log.warning(
            "rank %d on %s keeps the others waiting: in each of %d steps it took more than %g "
            "times as long as they do to come to the reduction of the loss, %.3g s where that is "
            "%.3g s; its batch was %.3g s late. Look at its data loading, and at what else runs on "
            "that host.",
            rank, self._hosts[rank], STEPS, FACTOR, own, others, late,
        )  # fmt: skip
        self._note("slow", rank, self._hosts[rank])
