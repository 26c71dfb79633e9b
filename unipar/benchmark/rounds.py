"""Statistics over the repeats of a cell, and over rounds of two cells."""

from __future__ import annotations

import statistics

from unipar.benchmark.records import Trial
from unipar.benchmark.result import CellResult
from unipar.benchmark.statistics import Estimate


def slowest(trial: Trial) -> list[float]:
    """Seconds of each timed step on the rank that took longest."""
    return [max(step) for step in zip(*(rank.seconds for rank in trial.ranks), strict=True)]


def step_time(trial: Trial) -> float:
    """The median of :func:`slowest`, in seconds."""
    return statistics.median(slowest(trial))


def paired(one: CellResult, other: CellResult) -> Estimate | None:
    """The ratio of two cells' median steps in the rounds in which both have run."""
    ours = {trial.repeat: step_time(trial) for trial in one.trials}
    theirs = {trial.repeat: step_time(trial) for trial in other.trials}
    rounds = sorted(ours.keys() & theirs.keys())
    if not rounds:
        return None
    return Estimate.of([ours[n] for n in rounds], [theirs[n] for n in rounds])
