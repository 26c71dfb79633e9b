"""How times of passes become parts of a global batch, and when they are taken again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unipar.train.shares import EARLY, GAIN, SELDOM, SLOWER, STEPS, AutoShares, Finding
from unipar.train.speeds import Speeds


def speeds(samples: list[float], *, fixed: float = 1.0, many: int = 8, noise: float = 0) -> Speeds:
    """Of ranks that take ``samples`` seconds for a sample, and ``fixed`` for a pass."""
    few = many // 2
    over_few, over_many = (
        tuple(fixed + size * sample + noise * rank for rank, sample in enumerate(samples))
        for size in (few, many)
    )
    return Speeds(few, many, over_few, over_many)


@pytest.mark.parametrize(
    ("samples", "size", "parts"),
    [
        ([1, 2], 24, [16, 8]),
        ([1, 1, 1], 24, [8, 8, 8]),
        ([1, 2, 2, 1], 24, [8, 4, 4, 8]),
        ([1, 100], 24, [23, 1]),
    ],
)
def test_parts_are_in_proportion_to_speeds(samples: list[float], size: int, parts: list[int]):
    assert speeds(samples, fixed=0.001).parts(size) == parts


def test_passes_that_cost_more_than_they_save_are_not_added():
    assert speeds([1, 2], fixed=100, many=12).parts(24) == [12, 12]
    assert speeds([1, 2], fixed=0.1, many=12).parts(24) == [16, 8]


def test_a_pass_without_a_sample_costs_one():
    # Rank 1 would run four passes on one sample each.
    assert speeds([1, 10], fixed=0.0, many=2).step([7, 1]) == pytest.approx(40)


@given(
    st.lists(st.floats(0.01, 10), min_size=2, max_size=6),
    st.floats(0, 10),
    st.integers(2, 8),
    st.integers(2, 8),
)
def test_no_move_of_a_sample_makes_a_step_faster(
    samples: list[float], fixed: float, many: int, each: int
):
    size = max(many, each) * len(samples)
    found = speeds(samples, fixed=fixed, many=many)
    parts = found.parts(size)
    assert sum(parts) == size
    assert min(parts) >= 1
    passes = math.ceil(max(parts) / many)
    for to in range(len(parts)):
        for of in range(len(parts)):
            moved = list(parts)
            moved[of] -= 1
            moved[to] += 1
            if min(moved) >= 1 and math.ceil(max(moved) / many) == passes:
                assert found.step(moved) >= found.step(parts) * (1 - 1e-9)


def test_factors_leave_out_what_a_pass_takes_anyway():
    assert speeds([1, 2, 1.5], fixed=50).factors == pytest.approx([1, 2, 1.5])


def test_a_gain_counts_if_both_halves_of_the_rounds_have_it():
    slow, alike, other = speeds([1, 2]), speeds([1, 1]), speeds([2, 1])
    assert Finding.of([slow] * 4, [12, 12]).sure
    assert not Finding.of([alike] * 4, [12, 12]).faster
    assert not Finding.of([slow] * 4, [16, 8]).faster
    scattered = Finding.of([slow, slow, other, other], [12, 12])
    assert not scattered.sure
    assert not Finding.of([speeds([1, GAIN - 0.02])] * 4, [120, 120]).faster


class Aging(AutoShares):
    def __init__(self, price: float) -> None:
        self._watch_from(price)


def test_speeds_are_measured_early_if_steps_take_longer():
    shares = Aging(price=1.0)
    usual = [shares.age(0.5) for _ in range(STEPS)]
    longer = [shares.age(0.5 * SLOWER + 0.1) for _ in range(STEPS)]
    assert not any(usual)
    assert longer.index(True) == STEPS // 2
    assert sum([0.5] * STEPS) >= EARLY


def test_speeds_are_measured_seldom_without_a_reason():
    shares = Aging(price=1.0)
    steps = [shares.age(0.5) for _ in range(300)]
    assert steps.index(True) == SELDOM / 0.5
