"""The share of a step that the ranks of a pipeline idle: as timed, and by the formula."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from unipar.benchmark.records import Passes, Rank, Trial
from unipar.benchmark.statistics import Spread

if TYPE_CHECKING:
    from unipar.engine import TimedSchedule


class PassTimes:
    """Times the passes of a pipeline while it is entered; a :class:`unipar.engine.PassClock`.

    On a GPU by events in the stream that computes, which nothing waits for before :meth:`read`.

    Args:
        schedule: runs the stages of this rank.
        device: ``"cpu"`` or an accelerator's type.
        pipeline: which, where several run on different samples.
    """

    def __init__(self, schedule: TimedSchedule, device: str, pipeline: int) -> None:
        self._schedule, self._device, self._pipeline = schedule, device, pipeline
        self._steps: list[tuple[tuple[Any, Any], list[tuple[Any, Any]], float | None]] = []
        self._passes: list[tuple[Any, Any]] = []

    def __enter__(self) -> PassTimes:
        self._schedule.clock = self
        return self

    def __exit__(self, *_: object) -> None:
        self._schedule.clock = None

    @contextlib.contextmanager
    def batch(self, bubble: float | None) -> Iterator[None]:
        """Time a step."""
        self._passes, begin = [], self._now()
        yield
        self._steps.append(((begin, self._now()), self._passes, bubble))

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Time a pass."""
        begin = self._now()
        yield
        self._passes.append((begin, self._now()))

    def read(self) -> Passes | None:
        """Times so far, once the device has come to the last of them; ``None`` without a step."""
        if not self._steps:
            return None
        if self._device != "cpu":
            torch.get_device_module(self._device).synchronize()
        return Passes(
            pipeline=self._pipeline,
            whole=[self._seconds(*span) for span, _, _ in self._steps],
            computing=[
                sum(self._seconds(*span) for span in passes) for _, passes, _ in self._steps
            ],
            formula=[bubble for _, _, bubble in self._steps],
        )

    def _now(self) -> Any:
        if self._device == "cpu":
            return time.perf_counter()
        event = torch.get_device_module(self._device).Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        return end - begin if self._device == "cpu" else begin.elapsed_time(end) / 1e3


def measured(trials: Iterable[Trial]) -> Spread | None:
    """Spread over steps and repeats of the share that ranks idle; ``None`` without a pipeline."""
    shares = [share for trial in trials for share in idle_shares(trial.ranks)]
    return Spread.of(shares) if shares else None


def by_formula(trials: Iterable[Trial]) -> float | None:
    """The same by the formula, in the median step; ``None`` where it does not hold."""
    shares = [share for trial in trials for one in _passes(trial.ranks) for share in one.formula]
    known = [share for share in shares if share is not None]
    return statistics.median(known) if known and len(known) == len(shares) else None


def idle_shares(ranks: Iterable[Rank]) -> list[float]:
    """``1 - mean(computing) / max(whole)`` over the ranks of a pipeline, in each step of each.

    A rank that is done earlier waits for the others before the optimizer steps, so a step of the
    pipeline is as long as that of the rank that takes longest.
    """
    pipelines: dict[int, list[Passes]] = defaultdict(list)
    for one in _passes(ranks):
        pipelines[one.pipeline].append(one)
    return [
        1 - statistics.fmean(computing) / max(whole)
        for own in pipelines.values()
        for computing, whole in zip(
            zip(*(one.computing for one in own), strict=True),
            zip(*(one.whole for one in own), strict=True),
            strict=True,
        )
    ]


def _passes(ranks: Iterable[Rank]) -> list[Passes]:
    return [rank.passes for rank in ranks if rank.passes is not None]
