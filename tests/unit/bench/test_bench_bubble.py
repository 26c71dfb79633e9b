"""The share of a step that a pipeline's ranks idle, by the times of its passes."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest

from unipar.benchmark.bubble import PassTimes, by_formula, idle_shares, measured
from unipar.benchmark.meter import PIPELINED, WATCHED, Meter
from unipar.benchmark.records import Passes, Rank, Trial
from unipar.engine import TimedSchedule, bubble_of


def rank(
    whole: list[float],
    computing: list[float],
    *,
    pipeline: int = 0,
    formula: list[float | None] | None = None,
) -> Rank:
    passes = Passes(
        pipeline=pipeline,
        whole=whole,
        computing=computing,
        formula=[0.2] * len(whole) if formula is None else formula,
    )
    return Rank(rank=0, seconds=[], threads=1, passes=passes)


def trial(*ranks: Rank) -> Trial:
    return Trial(repeat=0, losses=[], setup_seconds=0.0, first_step_seconds=0.0, ranks=list(ranks))


def test_a_step_is_as_long_as_that_of_the_rank_that_takes_longest() -> None:
    """1F1B of two stages and four micro-batches, each of 1 forward and 2 backward."""
    first, last = rank([15.0, 30.0], [12.0, 24.0]), rank([13.0, 28.0], [12.0, 12.0])
    assert idle_shares([first, last]) == pytest.approx([0.2, 0.4])


def test_pipelines_on_other_samples_do_not_wait_for_each_other() -> None:
    ranks = [
        rank([15.0], [12.0], pipeline=0),
        rank([15.0], [12.0], pipeline=0),
        rank([30.0], [24.0], pipeline=1),
        rank([30.0], [24.0], pipeline=1),
    ]
    assert idle_shares(ranks) == pytest.approx([0.2, 0.2])


def test_steps_of_all_repeats_count() -> None:
    found = measured([trial(rank([10.0], [9.0])), trial(rank([10.0, 10.0], [7.0, 6.0]))])
    assert found is not None
    assert (found.median, found.count) == (pytest.approx(0.3), 3)


def test_without_a_pipeline_there_is_neither() -> None:
    without = trial(Rank(rank=0, seconds=[], threads=1))
    assert measured([without]) is None
    assert by_formula([without]) is None


def test_the_formula_is_that_of_most_steps_or_none() -> None:
    shorter: list[float | None] = [0.2, 0.2, 0.5]
    assert by_formula([trial(rank([1.0] * 3, [1.0] * 3, formula=shorter))]) == 0.2
    assert by_formula([trial(rank([1.0], [1.0], formula=[None]))]) is None


def test_the_formula_is_narayanans() -> None:
    assert bubble_of(4, 8, 1) == 3 / 11
    assert bubble_of(4, 8, 2) == 3 / 19
    assert bubble_of(1, 8, 1) == 0


class Schedule:
    """Computes half of the time."""

    clock: Any = None

    def run(self) -> None:
        clock = self.clock
        with contextlib.nullcontext() if clock is None else clock.batch(0.2):
            for _ in range(2):
                with contextlib.nullcontext() if clock is None else clock.computing():
                    time.sleep(0.01)
                time.sleep(0.01)


def test_a_schedule_has_a_clock_while_it_is_asked_to() -> None:
    schedule = Schedule()
    assert isinstance(schedule, TimedSchedule)
    times = PassTimes(schedule, "cpu", pipeline=3)
    assert times.read() is None
    for _ in range(2):
        with times:
            schedule.run()
        assert schedule.clock is None
        schedule.run()
    found = times.read()
    assert found is not None
    assert (found.pipeline, found.formula) == (3, [0.2, 0.2])
    for whole, computing in zip(found.whole, found.computing, strict=True):
        assert computing >= 0.02
        assert whole - computing >= 0.02


def test_only_pipelines_take_more_steps(tmp_path: Any) -> None:
    def steps(*, pipeline: bool) -> int:
        meter = Meter(tmp_path, warmup=2, steps=10, data=None, began=0.0, pipeline=pipeline)
        return meter.num_steps

    assert steps(pipeline=False) == 2 + 10 + WATCHED
    assert steps(pipeline=True) == 2 + 10 + PIPELINED + WATCHED
