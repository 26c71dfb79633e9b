"""Unequal shares: the same samples in the same order, cut at other places."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from unipar.config import RunConfig
from unipar.data import Loader
from unipar.data.order import Slicing, apportioned
from unipar.errors import ConfigError


class Numbers(IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self):
        yield from range(self.n)


KINDS = {"map-style": lambda n: list(range(n)), "stream": Numbers}
Number = st.integers(1, 8) | st.floats(0.5, 4)


@dataclass(frozen=True)
class Cut:
    """``n`` samples in batches of ``size``, in ``shares``, the largest in parts of ``micro``."""

    n: int
    size: int
    shares: tuple[float, ...]
    micro: int
    seed: int


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    shares = tuple(draw(st.lists(Number, min_size=1, max_size=6)))
    # Enough for each share to have a sample.
    size = math.ceil(sum(shares) / min(shares)) + draw(st.integers(1, 20))
    n = size + draw(st.integers(0, 2 * size))
    micro = draw(st.integers(1, max(1, int(size * max(shares) / sum(shares)))))
    return Cut(n, size, shares, micro, draw(st.integers(0, 2**31)))


def loaders(cut: Cut, kind: str = "map-style", **changes: Any) -> list[Loader]:
    settings = {"shares": cut.shares, "micro_batch_size": cut.micro, **changes}
    return [
        Loader(
            KINDS[kind](cut.n),
            global_batch_size=cut.size,
            data_rank=rank,
            data_size=len(cut.shares),
            seed=cut.seed,
            **settings,
        )
        for rank in range(len(cut.shares))
    ]


def counted(batch: Any) -> list[int]:
    return [i for micro in batch for i in micro.data.tolist()[: micro.num_samples]]


def epoch_of(group: list[Loader]) -> list[list[int]]:
    """The samples of each global batch of an epoch, over all ranks."""
    steps = zip(*map(list, group), strict=True)
    return [[i for batch in step for i in counted(batch)] for step in steps]


@pytest.mark.parametrize("kind", KINDS)
@given(cut=cuts(), epoch=st.integers(0, 1))
def test_steps_see_the_samples_of_equal_shares_in_the_same_order(kind: str, cut: Cut, epoch: int):
    groups = loaders(cut, kind), loaders(cut, kind, shares=None, micro_batch_size=None)
    for group in groups:
        for loader in group:
            loader.load_state_dict({"epoch": epoch, "index": 0})
    unequal, equal = map(epoch_of, groups)
    assert unequal == equal
    assert sorted(i for batch in unequal for i in batch) == list(range(cut.n))


@given(cut=cuts())
def test_a_run_goes_on_with_other_shares_and_with_none(cut: Cut):
    group = loaders(cut)
    whole = epoch_of(group)
    first = loaders(cut)[0]
    next(iter(first))
    reversed_shares = tuple(reversed(cut.shares))
    for shares in (None, reversed_shares):
        resumed = loaders(cut, shares=shares, micro_batch_size=None)
        for loader in resumed:
            loader.load_state_dict(first.state_dict())
        if resumed[0].position.epoch == 0:
            assert epoch_of(resumed) == whole[1:]


@pytest.mark.parametrize("kind", KINDS)
@given(cut=cuts())
def test_ranks_run_equally_many_micro_batches_each_rank_s_as_equal_as_can_be(kind: str, cut: Cut):
    group = loaders(cut, kind)
    for step in zip(*map(list, group), strict=True):
        num_samples = step[0].global_num_samples
        assert len({len(batch) for batch in step}) == 1
        assert len(step[0]) <= group[0].accumulation
        assert len(step[0]) == group[0].accumulation or num_samples < cut.size
        sizes = [[micro.num_samples for micro in batch] for batch in step]
        totals = list(map(sum, sizes))
        assert sum(totals) == num_samples
        largest = totals.index(max(totals))
        assert max(sizes[largest]) <= cut.micro
        for batch, own, share in zip(step, sizes, cut.shares, strict=True):
            # Of the exact part each rank has the whole number above or below.
            assert abs(sum(own) - num_samples * share / sum(cut.shares)) < 1 + 1e-9
            # What fits in memory is tried on the first.
            assert max(own) == own[0]
            # BatchNorm learns nothing of a sample that is left alone, nor does a pass gain by it.
            assert max(own) - min(own) <= 1
            assert all(len(micro.data) >= 1 for micro in batch)


@given(
    num_samples=st.integers(1, 500),
    shares=st.lists(st.integers(1, 30), min_size=1, max_size=8),
)
def test_a_larger_batch_never_has_a_smaller_largest_part(num_samples: int, shares: list[int]):
    before, after = (apportioned(n, tuple(shares)) for n in (num_samples, num_samples + 1))
    assert max(before) <= max(after)


@given(
    num_samples=st.integers(1, 200),
    micro=st.integers(1, 50),
    ranks=st.integers(1, 9),
)
def test_equal_shares_are_cut_into_as_few_and_as_equal_parts_as_can_be(
    num_samples: int, micro: int, ranks: int
):
    count = math.ceil(math.ceil(num_samples / ranks) / micro)
    for rank in range(ranks):
        found = Slicing(num_samples, micro, rank, ranks).microbatches(num_samples)
        start, end = rank * num_samples // ranks, (rank + 1) * num_samples // ranks
        assert [i for a, b in found for i in range(a, b)] == list(range(start, end))
        sizes = [b - a for a, b in found]
        assert len(sizes) == count
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= micro


def test_no_sample_is_left_alone_that_need_not_be():
    sizes = {
        (samples, micro): [b - a for a, b in Slicing(samples, micro, 0, 1).microbatches(samples)]
        for samples, micro in ((4, 3), (10, 4), (9, 8))
    }
    assert sizes == {(4, 3): [2, 2], (10, 4): [4, 3, 3], (9, 8): [5, 4]}


@pytest.mark.parametrize(
    ("shares", "size", "expected"),
    [
        ([2, 1], 9, [6, 3]),
        # What is left over goes to the largest remainders; of equal ones, to the first.
        ([2, 1], 8, [5, 3]),
        ([1, 1, 2], 6, [2, 1, 3]),
        ([3, 1, 1, 1], 16, [8, 3, 3, 2]),
        # As they are written, not as they are in binary.
        ([0.1, 0.3], 4, [1, 3]),
        ([1e-300, 2e-300], 3, [1, 2]),
        ([1, 1.0], 5, [2, 3]),
    ],
)
def test_parts_are_rounded_by_largest_remainder(shares: Any, size: int, expected: list[int]):
    loader = Loader(list(range(size)), global_batch_size=size, shares=shares, data_size=len(shares))
    assert loader.share_sizes == expected


def test_micro_batches_of_smaller_shares_are_smaller_in_proportion():
    group = [
        Loader(
            list(range(16)),
            global_batch_size=12,
            micro_batch_size=4,
            shares=[2, 1],
            data_rank=rank,
            data_size=2,
            shuffle=False,
        )
        for rank in range(2)
    ]
    first, ragged = zip(*map(list, group), strict=True)
    assert [[m.data.tolist() for m in batch] for batch in first] == [
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[8, 9], [10, 11]],
    ]
    assert [[m.data.tolist() for m in batch] for batch in ragged] == [[[12, 13, 14]], [[15]]]


def test_a_share_that_a_ragged_batch_has_nothing_for_is_padded():
    loader = Loader(
        list(range(9)), global_batch_size=8, shares=[3, 1], data_rank=1, data_size=2, shuffle=False
    )
    *_, last = loader
    assert [(m.data.tolist(), m.num_samples) for m in last] == [([8], 0)]


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ([2, 1, 1], r"\[2, 1, 1\] are 3 number.*among 2 data-parallel rank.*Give 2, .*\[2, 1\]"),
        ([3], r"are 1 number.*Give 2"),
        ([100, 1], r"leave data-parallel rank 1 none of the 8 sample.*global_batch_size to 101"),
        ([1, 0], r"positive, finite numbers.*such as \[2, 1\]"),
        ([1, -2], "positive, finite"),
        ([1, math.inf], "positive, finite"),
        ([1, math.nan], "positive, finite"),
        ([1, True], "positive, finite"),
        ([], "positive, finite"),
        (2, "positive, finite"),
        ("fast", "shares='fast': give a list of positive.* by shares='auto'"),
        ("auto", r"shares='auto' measures .* of your own numbers, such as shares=\[2, 1\]"),
    ],
)
def test_shares_that_cannot_be_are_refused_with_what_to_give(shares: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        Loader(list(range(8)), global_batch_size=8, shares=shares, data_size=2)


def test_the_config_takes_numbers_and_auto():
    assert RunConfig.build(shares=[2, 1]).shares == (2.0, 1.0)
    assert RunConfig.build(shares=None).shares is None
    assert RunConfig.build(shares="auto").shares == "auto"
    with pytest.raises(ConfigError, match=r"shares='fast': give a list of positive"):
        RunConfig.build(shares="fast")


def test_a_micro_batch_is_at_most_the_largest_share():
    settings: Any = {"global_batch_size": 8, "shares": [3, 1], "data_size": 2}
    assert Loader(list(range(8)), micro_batch_size=6, **settings).accumulation == 1
    with pytest.raises(ConfigError, match=r"micro_batch_size=7.*leaves at most 6. Use 1 to 6"):
        Loader(list(range(8)), micro_batch_size=7, **settings)
