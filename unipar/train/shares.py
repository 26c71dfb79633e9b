"""``shares="auto"``: which part of each global batch a rank takes, and when that is decided."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unipar.data import Loader
from unipar.loss import LossFn
from unipar.strategy import Engine
from unipar.train.speeds import Speeds, SpeedTest
from unipar.world import Flag, World

log = logging.getLogger("unipar")

ROUNDS = (4, 8, 16)
"""How often each rank is timed: more often where fewer times do not tell ranks apart."""
GAIN = 1.05
"""How many times as fast a step has to become for parts to be changed."""
STEPS = 20
SLOWER = 1.25
"""How many times as long steps have to take for speeds to be measured early."""
SELDOM, EARLY = 100, 10
"""How many times as long as it takes to measure speeds a run trains in between."""


@dataclass(frozen=True)
class Finding:
    """What timed passes say of other parts.

    Attributes:
        parts: samples of a full global batch, by data-parallel rank.
        factors: how many times as long as the fastest rank each takes for a sample.
        faster: whether a step would be faster by enough.
        sure: whether each half of the rounds says so for itself: of noise they would not.
    """

    parts: list[int]
    factors: list[float]
    faster: bool
    sure: bool

    @classmethod
    def of(cls, rounds: Sequence[Speeds], present: Sequence[int]) -> Finding:
        """What these rounds say, beside the ``present`` parts."""
        half = len(rounds) // 2
        speeds = Speeds.least(rounds)
        parts = speeds.parts(sum(present))
        each = speeds, Speeds.least(rounds[:half]), Speeds.least(rounds[half:])
        faster = [one.step(present) > GAIN * one.step(parts) for one in each]
        factors = [round(factor, 2) for factor in speeds.factors]
        return cls(parts, factors, faster[0], all(faster))

    @property
    def why(self) -> str:
        if not self.faster:
            return f"no other parts would make a step faster by {GAIN - 1:.0%}"
        if not self.sure:
            return "their times scatter too much to tell them apart"
        factors = ", ".join(f"{factor:.3g}" for factor in self.factors)
        return f"a sample takes them {factors} times as long as the fastest of them"


class AutoShares:
    """Keeps each rank's part of a global batch to what fits its speed.

    Speeds are measured at the beginning; again when steps take longer, since a rank that has become
    slower holds up all of them; and now and then, since one that has become faster is not seen in
    them: so seldom that it costs a hundredth.

    Args:
        engine: between two steps.
        loader: of the run, with equal parts.
        loss_fn: as in training.
        world: the joined processes.
        note: called with each decision, by keywords in JSON types.
    """

    def __init__(
        self,
        engine: Engine,
        loader: Loader,
        loss_fn: LossFn,
        world: World,
        note: Callable[..., None],
    ) -> None:
        self._world, self._note = world, note
        self._test = SpeedTest(engine, loader, loss_fn, world)
        self._parts = self._cuts = loader.share_sizes
        self._watch_from(0.0)

    @property
    def changed(self) -> bool:
        """Whether :meth:`cut` would cut otherwise than it did."""
        return self._parts != self._cuts

    def cut(self, loader: Loader) -> Loader:
        """The loader at its place, with the parts that were decided on last."""
        if not self.changed:
            return loader
        self._cuts = self._parts
        return loader.with_shares(self._parts)

    def measure(self) -> None:
        """Measure speeds, and decide on parts. Collective."""
        began = time.perf_counter()
        self._test.warm_up()
        rounds = self._test.rounds(ROUNDS[0])
        found = Finding.of(rounds, self._parts)
        for count in ROUNDS[1:]:
            if found.faster and not found.sure:
                rounds += self._test.rounds(count - len(rounds))
                found = Finding.of(rounds, self._parts)
        if found.sure:
            self._parts = found.parts
        seconds = time.perf_counter() - began
        log.info(
            "data-parallel ranks %s %s of the %d samples of a global batch: %s (found in %.2g s)",
            "take" if found.sure else "keep",
            ", ".join(map(str, self._parts)),
            sum(self._parts),
            found.why,
            seconds,
        )
        self._note(
            parts=self._parts,
            changed=found.sure,
            factors=found.factors if found.sure else None,
            seconds=round(seconds, 3),
        )
        self._watch_from(seconds)

    def are_due(self, seconds: float) -> bool:
        """Return whether speeds are to be measured now, after a step; the same on every rank.

        Args:
            seconds: that the step took.
        """
        if self._world.is_main and self.age(seconds):
            # Clocks differ between ranks: the flag makes them measure after the same step.
            self._world.raise_flag(Flag.SPEEDS)
        return self._world.take_flag(Flag.SPEEDS)

    def age(self, seconds: float) -> bool:
        """Note a step that took this time; return whether speeds are too old after it."""
        self._trained += seconds
        self._newest.append(seconds)
        if len(self._newest) < STEPS:
            return False
        newest = statistics.median(self._newest)
        if self._usual is None:
            self._usual = newest
        slower = newest > SLOWER * self._usual
        return self._trained > self._price * (EARLY if slower else SELDOM)

    def _watch_from(self, price: float) -> None:
        self._price, self._trained = price, 0.0
        self._usual: float | None = None
        self._newest: deque[float] = deque(maxlen=STEPS)
