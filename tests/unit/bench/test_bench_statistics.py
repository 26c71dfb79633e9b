"""Spreads, intervals, and fits, against values worked out by hand."""

from __future__ import annotations

import random

import pytest

from unipar.benchmark.load import of_others
from unipar.benchmark.probe import fit_line
from unipar.benchmark.records import Trial, Usage
from unipar.benchmark.reference import largest_difference
from unipar.benchmark.scaling import amdahl
from unipar.benchmark.statistics import Estimate, Spread
from unipar.benchmark.store import Finding
from unipar.benchmark.summary import predicted


def test_a_spread_holds_percentiles() -> None:
    spread = Spread.of([float(value) for value in range(101)])
    assert (spread.median, spread.p5, spread.p95, spread.count) == (50.0, 5.0, 95.0, 101)
    assert Spread.of([2.0]) == Spread(median=2.0, p5=2.0, p95=2.0, count=1)
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


def test_a_ratio_differs_only_beyond_its_noise() -> None:
    slower = Estimate.of([1.20, 1.22, 1.19, 1.21, 1.20], [1.0, 1.0, 1.0, 1.0, 1.0])
    assert slower.differs
    assert slower.low <= slower.median == 1.20 <= slower.high
    noisy = Estimate.of([0.8, 1.3, 1.1, 0.9, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0])
    assert not noisy.differs
    # One pair says nothing of noise, however far apart the two are.
    assert not Estimate.of([2.0], [1.0]).differs


@pytest.mark.parametrize("repeats", [2, 3, 5])
def test_equals_are_told_apart_as_rarely_as_the_interval_says(repeats: int) -> None:
    draw = random.Random(repeats)

    def group() -> list[float]:
        return [draw.gauss(1.0, 0.05) for _ in range(repeats)]

    paired = [Estimate.of(group(), group()) for _ in range(400)]
    unpaired = [Estimate.unpaired(group(), group()) for _ in range(400)]
    for found in (paired, unpaired):
        assert sum(one.differs for one in found) / 400 < 0.08


def test_what_cannot_be_told_is_neither_the_same_nor_more() -> None:
    verdicts = {
        "more": ([1.20, 1.21, 1.22], [1.0, 1.0, 1.0]),
        "less": ([0.80, 0.81, 0.82], [1.0, 1.0, 1.0]),
        # Beyond the noise, and too small to matter.
        "same": ([1.010, 1.011, 1.012], [1.0, 1.0, 1.0]),
        "unknown": ([0.8, 1.0, 1.5], [1.0, 1.0, 1.0]),
    }
    for verdict, (values, baseline) in verdicts.items():
        assert Estimate.of(values, baseline).verdict() == verdict
        assert Estimate.unpaired(values, baseline).verdict() == verdict
    assert Estimate.of([10.0], [1.0]).verdict() == "unknown"


def test_amdahl_finds_the_serial_fraction_again() -> None:
    serial = 0.2
    seconds = [serial + (1 - serial) / count for count in (1, 2, 4, 8)]
    assert amdahl([1, 2, 4, 8], seconds) == pytest.approx(serial)
    assert amdahl([1, 2], [1.0, 0.5]) == 0.0
    assert amdahl([1, 2], [1.0, 2.0]) == pytest.approx(3.0)
    assert amdahl([1], [1.0]) is None


def test_latency_and_bandwidth_are_found_again() -> None:
    alpha, beta = 5e-5, 2e-10
    points = [(4**power, alpha + beta * 4**power) for power in range(5, 13)]
    assert fit_line(points) == pytest.approx((alpha, beta))


def test_a_loss_that_is_no_number_is_as_far_off_as_can_be() -> None:
    assert largest_difference([1.0, 2.0], [1.0, 2.5]) == pytest.approx(0.2)
    assert largest_difference([1.0, float("nan")], [1.0, 2.0]) == float("inf")
    assert largest_difference([1.0], [1.0, 2.0]) == float("inf")
    assert largest_difference([0.0], [0.0]) == 0.0


def test_what_others_had_of_the_cores_is_what_the_ranks_had_not() -> None:
    before = Usage(wall=10.0, cores=2, busy=100.0, own=3.0)
    ranks = [Usage(wall=20.0, cores=2, busy=118.0, own=own).since(before) for own in (10.0, 8.0)]
    assert of_others(ranks) == pytest.approx((18.0 - 7.0 - 5.0) / 20.0)
    # A clock that ticks every hundredth says nothing of so short a time.
    assert of_others([Usage(wall=0.05, cores=2, busy=0.1, own=0.0)]) is None
    assert of_others([]) is None


@pytest.mark.parametrize(
    ("sharded", "copies", "counted", "optimizer"),
    [
        # A rank of some frameworks counts its own share of the parameters.
        ({"parameters", "gradients", "optimizer"}, False, 500, 4000),
        ({"optimizer"}, True, 1000, 6000),
        (set(), False, 1000, 8000),
    ],
)
def test_predictions_divide_once_and_know_of_copies(
    sharded: set[str], copies: bool, counted: int, optimizer: int
) -> None:
    trial = Trial(repeat=0, losses=[], setup_seconds=0, first_step_seconds=0, ranks=[])
    found = Finding(
        trial=trial,
        items=1,
        samples=1,
        parameters=counted,
        optimizer="AdamW",
        sharded=frozenset(sharded),
        copies=copies,
    )
    memory = predicted(found, 1000, 2)
    assert memory
    assert memory.optimizer == optimizer
    assert memory.parameters == (2000 if "parameters" in sharded else 4000)
