"""The global order: every sample once, whatever the number of ranks, from any position on."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from unipar.data import Loader, Position
from unipar.errors import ConfigError, DataError


@dataclass(frozen=True)
class Cut:
    """A data set of ``n`` samples cut into batches of ``size``, over ``ranks``."""

    n: int
    size: int
    ranks: int
    micro: int | None
    seed: int


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    n = draw(st.integers(1, 60))
    size = draw(st.integers(1, n))
    ranks = draw(st.integers(1, 6))
    micro = draw(st.none() | st.integers(1, -(-size // ranks)))
    return Cut(n, size, ranks, micro, draw(st.integers(0, 2**31)))


class Numbers(IterableDataset):
    """The numbers from 0, as a stream that knows its place if it is asked to."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self):
        yield from range(self.n)


class PlacedNumbers(Numbers):
    """As :class:`Numbers`, and it can be told where to go on."""

    start = 0
    read = 0

    def __iter__(self):
        self.read, self.start = self.start, 0
        while self.read < self.n:
            self.read += 1
            yield self.read - 1

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["read"]


KINDS = {
    "map-style": lambda n: list(range(n)),
    "stream": Numbers,
    "stream with state": PlacedNumbers,
}


def loaders(cut: Cut, kind: str = "map-style", ranks: int | None = None) -> list[Loader]:
    size = ranks or cut.ranks
    micro = cut.micro if ranks is None else None
    return [
        Loader(
            KINDS[kind](cut.n),
            global_batch_size=cut.size,
            micro_batch_size=micro,
            data_rank=rank,
            data_size=size,
            seed=cut.seed,
        )
        for rank in range(size)
    ]


def counted(batch: Any) -> list[int]:
    """The samples of a rank's batch that count."""
    return [i for micro in batch for i in micro.data.tolist()[: micro.num_samples]]


def epoch_of(group: list[Loader]) -> list[list[int]]:
    """The samples of each global batch of an epoch, over all ranks."""
    return [
        [i for batch in step for i in counted(batch)]
        for step in zip(*map(list, group), strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
@given(cut=cuts(), epochs=st.integers(1, 2))
def test_every_sample_is_seen_once_in_each_epoch(kind: str, cut: Cut, epochs: int):
    group = loaders(cut, kind)
    for _ in range(epochs):
        seen = [i for batch in epoch_of(group) for i in batch]
        assert sorted(seen) == list(range(cut.n))


@pytest.mark.parametrize("kind", KINDS)
@given(cut=cuts(), epoch=st.integers(0, 2))
def test_a_step_sees_the_same_samples_in_the_same_order_on_any_number_of_ranks(
    kind: str, cut: Cut, epoch: int
):
    groups = loaders(cut, kind), loaders(cut, kind, ranks=1)
    for group in groups:
        for loader in group:
            loader.load_state_dict({"epoch": epoch, "index": 0})
    assert epoch_of(groups[0]) == epoch_of(groups[1])


@pytest.mark.parametrize("kind", KINDS)
@given(cut=cuts())
def test_ranks_run_equally_many_micro_batches_and_agree_on_the_global_batch(kind: str, cut: Cut):
    group = loaders(cut, kind)
    for step in zip(*map(list, group), strict=True):
        assert len({len(batch) for batch in step}) == 1
        assert len({batch.global_num_samples for batch in step}) == 1
        counts = [sum(micro.num_samples for micro in batch) for batch in step]
        assert sum(counts) == step[0].global_num_samples
        assert max(counts) - min(counts) <= 1
        for batch in step:
            assert all(micro.num_samples <= group[0].micro_batch_size for micro in batch)
            # Padding is run on a sample of the batch, so that every rank makes the same calls.
            assert all(len(micro.data) >= 1 for micro in batch)


@given(cut=cuts())
def test_a_full_batch_makes_as_many_micro_batches_as_the_accumulation_says(cut: Cut):
    group = loaders(cut)
    first = next(iter(group[0]))
    assert len(first) == group[0].accumulation


@pytest.mark.parametrize("kind", KINDS)
@given(cut=cuts(), stop=st.integers(0, 130), ranks=st.integers(1, 4))
def test_a_run_continues_where_it_was_on_any_number_of_ranks(
    kind: str, cut: Cut, stop: int, ranks: int
):
    """Two epochs, cut after ``stop`` steps, then continued from what was written to JSON."""
    whole = [batch for group in [loaders(cut, kind)] for _ in range(2) for batch in epoch_of(group)]
    stop = min(stop, len(whole) - 1)
    loader = loaders(cut, kind, ranks=1)[0]
    done = 0
    while done < stop:
        for _ in loader:
            done += 1
            if done == stop:
                break
    state = json.loads(json.dumps(loader.state_dict()))

    resumed = loaders(cut, kind, ranks=ranks)
    for one in resumed:
        one.load_state_dict(state)
    rest: list[list[int]] = []
    while resumed[0].position.epoch < 2:
        rest += epoch_of(resumed)
    assert rest == whole[stop:]


@given(cut=cuts())
def test_a_peek_changes_nothing(cut: Cut):
    for kind in KINDS:
        (peeked,), (other,) = loaders(cut, kind, ranks=1), loaders(cut, kind, ranks=1)
        first = counted(peeked.peek())
        seen = [counted(batch) for batch in peeked]
        assert seen[0] == first
        assert seen == [counted(batch) for batch in other]


def test_epochs_have_orders_of_their_own_and_seeds_too():
    def order(seed: int, epoch: int) -> list[int]:
        loader = Loader(list(range(50)), global_batch_size=50, seed=seed)
        loader.load_state_dict({"epoch": epoch, "index": 0})
        return counted(next(iter(loader)))

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_without_shuffling_the_order_is_the_data_sets():
    loader = Loader(list(range(7)), global_batch_size=3, shuffle=False)
    assert [counted(batch) for batch in loader] == [[0, 1, 2], [3, 4, 5], [6]]


def test_full_batches_are_cut_into_contiguous_equal_shares():
    """Rank r's micro-batch k begins at r * B / W + k * m of the global batch."""
    shares = [
        Loader(
            list(range(24)),
            global_batch_size=12,
            micro_batch_size=2,
            data_rank=rank,
            data_size=3,
            shuffle=False,
        )
        for rank in range(3)
    ]
    first = [[micro.data.tolist() for micro in next(iter(share))] for share in shares]
    assert first == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]


def test_the_position_moves_with_each_batch_and_to_the_next_epoch():
    loader = Loader(list(range(5)), global_batch_size=2)
    positions = [loader.position]
    for _ in loader:
        positions.append(loader.position)
    expected = [Position(0, 0), Position(0, 1), Position(0, 2), Position(1, 0)]
    assert positions == expected
    loader.rewind()
    assert loader.position == Position(0, 0)


def test_an_abandoned_iteration_goes_on_at_the_next_call():
    for num_workers in (0, 1):
        loader = Loader(list(range(9)), global_batch_size=3, shuffle=False, num_workers=num_workers)
        first = counted(next(iter(loader)))
        rest = [counted(batch) for batch in loader]
        assert [first, *rest] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]


def test_a_place_within_an_epoch_belongs_to_its_data_and_batches():
    loader = Loader(list(range(20)), global_batch_size=4)
    next(iter(loader))
    state = loader.state_dict()
    with pytest.raises(ConfigError, match=r"batch 1 .* batches of 4, and now global_batch_size=5"):
        Loader(list(range(20)), global_batch_size=5).load_state_dict(state)
    with pytest.raises(DataError, match=r"over 20 samples, and this data has 21.*load_model"):
        Loader(list(range(21)), global_batch_size=4).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"epoch with seed=0, and now seed=1.*Set seed=0"):
        Loader(list(range(20)), global_batch_size=4, seed=1).load_state_dict(state)
    with pytest.raises(ConfigError, match=r"epoch with shuffle=True, and now shuffle=False"):
        Loader(list(range(20)), global_batch_size=4, shuffle=False).load_state_dict(state)

    list(loader)
    other = Loader(list(range(21)), global_batch_size=5)
    other.load_state_dict(loader.state_dict())
    assert other.position == Position(1, 0)


def test_a_large_data_set_begins_at_once():
    """Only the order itself is held: 8 bytes a sample, not a Python list for each batch."""
    tracemalloc.start()
    next(iter(Loader(range(2_000_000), global_batch_size=64)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2_000_000


@given(micro=st.integers(1, 5), done=st.integers(0, 3))
def test_other_micro_batches_keep_the_place(micro: int, done: int):
    loader = Loader(list(range(20)), global_batch_size=5, seed=3)
    batches = iter(loader)
    for _ in range(done):
        next(batches)
    other = loader.with_micro_batch_size(micro)
    assert other.position == loader.position
    assert other.micro_batch_size == micro
    assert [counted(b) for b in other] == [counted(b) for b in batches]


@pytest.mark.parametrize(
    ("size", "micro", "ranks", "message"),
    [
        (0, None, 1, r"global_batch_size=0: ask for at least 1"),
        (8, 5, 2, r"micro_batch_size=5 does not fit: a global batch of 8 over 2 device"),
        (8, 0, 1, r"micro_batch_size=0 does not fit.*Use 1 to 8"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(
    size: int, micro: int | None, ranks: int, message: str
):
    with pytest.raises(ConfigError, match=message):
        Loader(list(range(9)), global_batch_size=size, micro_batch_size=micro, data_size=ranks)


def test_the_order_leaves_the_global_generator_alone():
    """Dropout must go on the same after a resume, which begins an iteration again."""
    for data in (list(range(6)), Numbers(6)):
        torch.manual_seed(0)
        before = torch.get_rng_state()
        list(Loader(data, global_batch_size=2))
        assert torch.equal(before, torch.get_rng_state())
