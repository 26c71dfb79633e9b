"""Medians, spreads, and what of a difference is more than noise."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from pydantic import BaseModel

_DRAWS = 2000


class Spread(BaseModel, frozen=True):
    """Measurements of one thing.

    Attributes:
        median: of them.
        p5: a twentieth is below.
        p95: a twentieth is above.
        count: how many there are.
    """

    median: float
    p5: float
    p95: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Percentiles by linear interpolation.

        Raises:
            ValueError: there are no values.
        """
        if not values:
            raise ValueError("a spread needs at least one value")
        ordered = sorted(values)
        return cls(
            median=statistics.median(ordered),
            p5=_percentile(ordered, 0.05),
            p95=_percentile(ordered, 0.95),
            count=len(ordered),
        )

    @property
    def relative(self) -> float:
        """``(p95 - p5) / median``."""
        return (self.p95 - self.p5) / self.median if self.median else 0.0


class Estimate(BaseModel, frozen=True):
    """The median of paired ratios, with the 95 % interval of that median.

    Attributes:
        median: of the ratios.
        low: lower end of the interval.
        high: upper end of the interval.
        pairs: how many ratios there are; with one there is no interval, and its ends are the
            ratio.
    """

    median: float
    low: float
    high: float
    pairs: int

    @classmethod
    def of(cls, values: Sequence[float], baseline: Sequence[float]) -> Estimate:
        """Of ``values[i] / baseline[i]``, by the bootstrap (Efron, 1979).

        Raises:
            ValueError: they are not equally many, or none.
        """
        ratios = [a / b for a, b in zip(values, baseline, strict=True)]
        if not ratios:
            raise ValueError("an estimate needs at least one pair")
        draw = random.Random(0)
        medians = sorted(
            statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(_DRAWS)
        )
        return cls(
            median=statistics.median(ratios),
            low=_percentile(medians, 0.025),
            high=_percentile(medians, 0.975),
            pairs=len(ratios),
        )

    @property
    def differs(self) -> bool:
        """Whether the ratio is not 1 beyond the noise; one pair shows nothing."""
        return self.pairs > 1 and not self.low <= 1.0 <= self.high


def _percentile(ordered: Sequence[float], at: float) -> float:
    place = at * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
