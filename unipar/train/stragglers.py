"""Ranks that keep the others waiting, found by when each comes to the reduction of the loss."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from unipar.world import Flag, World

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
    none of as many. Every :data:`EVERY` seconds, by rank 0's clock, the last times are gathered.

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
        self._times: deque[float] = deque(maxlen=STEPS)
        self._began = 0.0
        self._looked = time.perf_counter()
        self._slow: set[int] = set()

    def begin(self) -> None:
        """Note that this rank goes on to its next batch, and waits for nobody."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """Note that a step was taken. Collective."""
        # The first step compiles, and begins before the ranks have met.
        if not self._compares or not self._began:
            return
        reached = self._world.reduced_at
        self._times.append(reached - self._began)
        if self._world.is_main and reached - self._looked >= EVERY:
            self._looked = reached
            # Clocks differ between ranks: the flag makes them gather after the same step.
            self._world.raise_flag(Flag.TIMES)
        if self._world.take_flag(Flag.TIMES) and len(self._times) == STEPS:
            gathered = self._world.gather(list(self._times))
            if self._world.is_main:
                self.compare(gathered)

    def compare(self, times: Sequence[Sequence[float]]) -> None:
        """Say who has become slow, or has recovered.

        Args:
            times: each rank's own in the last steps, in seconds.
        """
        medians = [statistics.median_low(step) for step in zip(*times, strict=True)]
        for rank, own in enumerate(times):
            behind = [
                mine > FACTOR * median and mine - median > LEAST
                for mine, median in zip(own, medians, strict=True)
            ]
            if rank not in self._slow and all(behind):
                self._slow.add(rank)
                self._say(rank, statistics.median(own), statistics.median(medians))
            elif rank in self._slow and not any(behind):
                self._slow.remove(rank)
                log.warning("rank %d on %s is as fast as the others again", rank, self._hosts[rank])
                self._note("recovered", rank, self._hosts[rank])

    def _say(self, rank: int, own: float, median: float) -> None:
        log.warning(
            "rank %d on %s keeps the others waiting: in each of %d steps it came to the reduction "
            "of the loss more than %g times as late as the median of the ranks, after %.3g s where "
            "that is %.3g s. Look at its data loading, and at what else runs on that host.",
            rank, self._hosts[rank], STEPS, FACTOR, own, median,
        )  # fmt: skip
        self._note("slow", rank, self._hosts[rank])
