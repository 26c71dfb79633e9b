"""Medians, spreads, and what of a difference is more than noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel

LEAST = 0.03
"""Changes below this are none: two runs of one program differ by more than their repeats show."""

SAME = 0.10
"""Two things are called the same where a difference of this much is ruled out."""

ENOUGH = 3
"""Fewer repeats show too little of the noise to say which of two things is faster."""

Verdict = Literal["more", "less", "same", "unknown"]

# The 97.5th percentile of Student's t with 1, 2, … degrees of freedom.
_STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
_NORMAL = 1.960


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
    """The median of ratios, with a 95 % interval.

    The interval is Student's, of the mean of the ratios' logarithms; where it leaves the median
    out, it reaches to it. With a handful of repeats a bootstrap is far too narrow: of three pairs
    of equals, all lie on one side in every fourth case.

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
        """Of ``values[i] / baseline[i]``.

        Raises:
            ValueError: they are not equally many, or none.
        """
        ratios = [a / b for a, b in zip(values, baseline, strict=True)]
        if not ratios:
            raise ValueError("an estimate needs at least one pair")
        logs = [math.log(ratio) for ratio in ratios]
        error = _variance(logs) / len(logs)
        return cls._around(
            statistics.median(ratios), statistics.fmean(logs), error, len(logs) - 1, len(logs)
        )

    @classmethod
    def unpaired(cls, values: Sequence[float], baseline: Sequence[float]) -> Estimate:
        """Of two groups that have nothing in common, by Welch (1947).

        ``pairs`` is the number of the smaller group.

        Raises:
            ValueError: one of them is empty.
        """
        if not values or not baseline:
            raise ValueError("a ratio needs a value on both sides")
        groups = [[math.log(value) for value in group] for group in (values, baseline)]
        errors = [_variance(logs) / len(logs) for logs in groups]
        freedom = 1.0
        if sum(errors):
            parts = zip(errors, groups, strict=True)
            freedom = sum(errors) ** 2 / sum(e**2 / max(len(g) - 1, 1) for e, g in parts)
        mean = statistics.fmean(groups[0]) - statistics.fmean(groups[1])
        ratio = statistics.median(values) / statistics.median(baseline)
        return cls._around(ratio, mean, sum(errors), freedom, min(map(len, groups)))

    @classmethod
    def _around(
        cls, median: float, mean: float, error: float, freedom: float, pairs: int
    ) -> Estimate:
        if pairs == 1:
            return cls(median=median, low=median, high=median, pairs=1)
        half = _student(freedom) * math.sqrt(error)
        low, high = math.exp(mean - half), math.exp(mean + half)
        return cls(median=median, low=min(low, median), high=max(high, median), pairs=pairs)

    @property
    def differs(self) -> bool:
        """Whether the ratio is not 1 beyond the noise; one pair shows nothing."""
        return self.pairs > 1 and not self.low <= 1.0 <= self.high

    def verdict(self, least: float = LEAST) -> Verdict:
        """Return whether it is above or below 1 by ``least`` and beyond the noise.

        ``"same"`` is a finding, too: a difference of :data:`SAME` is ruled out. Where neither can
        be said, or there is one repeat, it is ``"unknown"``.
        """
        if self.pairs < 2:
            return "unknown"
        if self.low > 1 and self.median >= 1 + least:
            return "more"
        if self.high < 1 and self.median <= 1 - least:
            return "less"
        return "same" if self.low > 1 / (1 + SAME) and self.high < 1 + SAME else "unknown"


def _variance(values: Sequence[float]) -> float:
    return statistics.variance(values) if len(values) > 1 else 0.0


def _student(freedom: float) -> float:
    """The 97.5th percentile; between two degrees of freedom that of the fewer."""
    whole = max(int(freedom), 1)
    return _STUDENT[whole - 1] if whole <= len(_STUDENT) else _NORMAL + 2.5 / whole


def _percentile(ordered: Sequence[float], at: float) -> float:
    place = at * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
