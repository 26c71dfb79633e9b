"""Progress of a benchmark, and an estimate of the time left."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outlook:
    """Trials by their number, and the time that is left.

    Attributes:
        done: trials that have ended, those of earlier calls and those that are left out included.
        total: all of them.
        seconds: what the others will take, as the median of those that have ended did; before the
            first has, as long as it takes to start them.
        measured: whether any has ended.
    """

    done: int
    total: int
    seconds: float
    measured: bool

    @property
    def words(self) -> str:
        """``3 of 17, about 2 min left``."""
        told = f"{self.done} of {self.total}"
        if self.done == self.total:
            return told
        bound = "about" if self.measured else "at least"
        return f"{told}, {bound} {duration(self.seconds)} left"


class Tally:
    """Counts the trials of one call, each by its directory.

    Args:
        planned: directories of all trials.
        least: seconds that it takes to start one.
    """

    def __init__(self, planned: Iterable[Path], least: float) -> None:
        self._planned = set(planned)
        self._least = least
        earlier = [one for one in self._planned if (one / "answer.json").exists()]
        self._ended = set(earlier)
        self._took = [_seconds(one) for one in earlier]

    def ended(self, directories: Iterable[Path], seconds: float | None = None) -> None:
        """These have ended, or will not be run; one that was took so many seconds."""
        self._ended |= self._planned & set(directories)
        if seconds is not None:
            self._took.append(seconds)

    @property
    def outlook(self) -> Outlook:
        """As it is now."""
        left = len(self._planned) - len(self._ended)
        each = statistics.median(self._took) if self._took else self._least
        return Outlook(len(self._ended), len(self._planned), left * each, bool(self._took))


def duration(seconds: float) -> str:
    """``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _seconds(directory: Path) -> float:
    """How long an earlier trial took, by the clock of the file system."""
    began, ended = ((directory / f"{name}.json").stat().st_mtime for name in ("request", "answer"))
    return max(ended - began, 0.0)
