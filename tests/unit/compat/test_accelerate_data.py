"""Data is shared as Accelerate shares it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
)

from unipar.compat.accelerate.data_loader import (
    DealtLoader,
    SeedableRandomSampler,
    skip_first_batches,
)
from unipar.compat.accelerate.plugins import GradientAccumulationPlugin
from unipar.compat.accelerate.scheduler import Paced
from unipar.compat.accelerate.state import GradientState
from unipar.compat.accelerate.streams import ShardedStream
from unipar.errors import ConfigError
from unipar.world import Placement, World


class Rank(World):
    """One of several ranks, without the others: what is broadcast is what it has."""

    def broadcast(self, value: Any) -> Any:
        return value


class Stream(IterableDataset):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


def dealt(loader: DataLoader, rank: int, size: int, **how: Any) -> DealtLoader:
    given: dict[str, Any] = {"split": False, "even": True, "place": True, **how}
    return DealtLoader(
        loader, Rank(Placement(rank=rank, size=size)), enter=lambda *_: None, **given
    )


@pytest.mark.parametrize("samples", [1, 3, 7, 12, 16, 17])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("even", [False, True])
def test_batches_are_dealt_as_accelerate_deals_them(
    samples: int, size: int, drop_last: bool, split: bool, even: bool
) -> None:
    theirs = pytest.importorskip("accelerate.data_loader")
    batch = 2 * size if split else 3
    data = TensorDataset(torch.arange(samples))
    for rank in range(size):
        loader = DataLoader(data, batch_size=batch, drop_last=drop_last)
        mine = dealt(loader, rank, size, split=split, even=even)
        expected = theirs.BatchSamplerShard(
            BatchSampler(SequentialSampler(data), batch, drop_last),
            num_processes=size, process_index=rank, split_batches=split, even_batches=even,
        )  # fmt: skip
        assert [b[0].tolist() for b in mine] == list(expected)
        if even or not split:
            assert len(mine) == len(expected)


class Buckets(Sampler[list[int]]):
    """Batches of a size that some do not reach, wherever they are."""

    def __init__(self, lengths: list[int], size: int, *, drop_last: bool = False) -> None:
        self.lengths, self.batch_size, self.drop_last = lengths, size, drop_last

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[list[int]]:
        numbers = itertools.count()
        return (list(itertools.islice(numbers, length)) for length in self.lengths)


@settings(max_examples=300)
@given(
    lengths=st.lists(st.integers(1, 6), max_size=9), size=st.sampled_from([2, 3]),
    split=st.booleans(), even=st.booleans(), drop_last=st.booleans(),
)  # fmt: skip
def test_short_batches_anywhere_are_dealt_as_accelerate_deals_them(
    lengths: list[int], size: int, split: bool, even: bool, drop_last: bool
) -> None:
    theirs = pytest.importorskip("accelerate.data_loader")
    batches = Buckets(lengths, 6, drop_last=drop_last)
    loader = DataLoader(range(60), batch_sampler=batches)  # pyright: ignore[reportArgumentType]
    for rank in range(size):
        expected = theirs.BatchSamplerShard(batches, size, rank, split, even)
        mine = dealt(loader, rank, size, split=split, even=even)
        found: Any = mine._batches
        assert list(found) == list(expected)


def test_a_sampler_of_batches_asks_the_dataset_for_whole_ones() -> None:
    theirs = pytest.importorskip("accelerate.data_loader")
    data = TensorDataset(torch.arange(16), torch.arange(16))
    for rank in range(2):

        def loader() -> DataLoader:
            batches = BatchSampler(SequentialSampler(data), 4, drop_last=False)
            return DataLoader(data, sampler=batches, batch_size=None)  # pyright: ignore

        expected = theirs.prepare_data_loader(loader(), num_processes=2, process_index=rank)
        found = [one.tolist() for one, _ in dealt(loader(), rank, 2)]
        assert found == [one.tolist() for one, _ in iter(expected.base_dataloader)]
        assert len(found) == len(dealt(loader(), rank, 2)) == 2


class Told:
    """Anything that may be told of epochs."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def set_epoch(self, epoch: int) -> None:
        self.told.append(self.name)


class ToldData(Told, TensorDataset):
    def __init__(self, told: list[str]) -> None:
        TensorDataset.__init__(self, torch.arange(8))
        Told.__init__(self, "data", told)


class ToldBatches(Told, BatchSampler):
    def __init__(self, told: list[str], sampler: Any) -> None:
        BatchSampler.__init__(self, sampler, 2, drop_last=False)
        Told.__init__(self, "batches", told)


class ToldOrder(Told, SequentialSampler):
    def __init__(self, told: list[str], data: Any) -> None:
        SequentialSampler.__init__(self, data)
        Told.__init__(self, "order", told)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_those_are_told_of_an_epoch_whom_accelerate_tells(
    size: int, dispatch: bool, is_told: bool, skips: bool
) -> None:
    theirs = pytest.importorskip("accelerate.data_loader")

    def loader(told: list[str]) -> DataLoader:
        data = ToldData(told)
        order = ToldOrder(told, data) if is_told else SequentialSampler(data)
        return DataLoader(data, batch_sampler=ToldBatches(told, order))

    found: list[str] = []
    mine = dealt(loader(found), 0, size, dispatch=dispatch)
    (skip_first_batches(mine, 1) if skips else mine).set_epoch(3)
    expected: list[str] = []
    other = theirs.prepare_data_loader(
        loader(expected),
        num_processes=size,
        process_index=0,
        dispatch_batches=dispatch,
        put_on_device=dispatch,
    )
    (theirs.skip_first_batches(other, 1) if skips else other).set_epoch(3)
    assert found == expected


def test_ranks_read_shards_of_their_own_of_a_stream_that_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Sharded(Stream):
        n_shards = 2

        def shard(self, num_shards: int, index: int) -> list[int]:
            return list(range(self.length))[index::num_shards]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(IterableDataset=Sharded))
    stream = DataLoader(Sharded(8), batch_size=2)
    for rank in range(2):
        found = [one.tolist() for one in dealt(stream, rank, 2, dispatch=False)]
        assert found == [[rank, rank + 2], [rank + 4, rank + 6]]
    third = dealt(stream, 2, 3, dispatch=False)
    assert isinstance(third.dataset, ShardedStream)


@pytest.mark.parametrize("even", [False, True])
def test_batches_without_a_size_are_dealt_whole(even: bool) -> None:
    theirs = pytest.importorskip("accelerate.data_loader")
    batches = [[0, 1, 2], [3], [4, 5], [6], [7, 8]]
    for rank in range(2):
        mine = dealt(DataLoader(range(9), batch_sampler=batches), rank, 2, even=even)  # pyright: ignore[reportArgumentType]
        expected = theirs.BatchSamplerShard(batches, 2, rank, False, even)
        assert [b.tolist() for b in mine] == [list(one) for one in expected]


@pytest.mark.parametrize("samples", [3, 8, 11])
@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_streams_are_read_as_accelerate_reads_them(samples: int, drop: bool, split: bool) -> None:
    theirs = pytest.importorskip("accelerate.data_loader")
    for rank in range(2):
        expected = theirs.IterableDatasetShard(
            Stream(samples), batch_size=4, drop_last=drop, num_processes=2, process_index=rank,
            split_batches=split,
        )  # fmt: skip
        world = Rank(Placement(rank=rank, size=2))
        assert list(ShardedStream(Stream(samples), 4, world, drop=drop, split=split)) == list(
            expected
        )


def test_a_seeded_order_is_accelerates() -> None:
    theirs = pytest.importorskip("accelerate.data_loader")
    data = TensorDataset(torch.arange(12))
    loader = dealt(DataLoader(data, batch_size=3, shuffle=True), 0, 2, seed=5)
    expected = theirs.SeedableRandomSampler(range(12), data_seed=5, generator=torch.Generator())
    for _ in range(2):
        order = list(expected)
        assert [one for batch in loader for one in batch[0].tolist()] == order[:3] + order[6:9]
    batches: Any = loader.batch_sampler
    assert isinstance(batches.batch_sampler.sampler, SeedableRandomSampler)


class OwnOrder(RandomSampler):
    """A script's own."""


@pytest.mark.parametrize(
    ("size", "kind"),
    # Accelerate 1.15.0 cannot prepare a sampler of batches on one process.
    [(1, "own"), (2, "own"), (2, "batches"), (1, "skipping"), (2, "skipping")],
)
def test_seeded_orders_of_all_kinds_are_accelerates(size: int, kind: str) -> None:
    theirs = pytest.importorskip("accelerate.data_loader")
    data = TensorDataset(torch.arange(21))

    def loader() -> DataLoader:
        batches = BatchSampler(OwnOrder(data), 4, drop_last=False)
        if kind == "batches":
            return DataLoader(data, sampler=batches, batch_size=None)  # pyright: ignore
        return DataLoader(data, batch_sampler=batches)

    def epochs(loader: Any, skip: Any) -> list[Any]:
        torch.manual_seed(7)
        found = []
        for epoch in range(3):
            now = skip(loader, 2) if kind == "skipping" else loader
            now.set_epoch(epoch)
            rows = getattr(now, "base_dataloader", None)
            rows = DataLoader.__iter__(now) if rows is None else iter(rows)
            found.append([batch[0].tolist() for batch in rows])
        return found

    for rank in range(size):
        how = {"num_processes": size, "process_index": rank}
        expected = theirs.prepare_data_loader(
            loader(), use_seedable_sampler=True, data_seed=3, **how
        )
        mine = dealt(loader(), rank, size, seed=3)
        assert epochs(mine, skip_first_batches) == epochs(expected, theirs.skip_first_batches)


def test_a_loader_knows_its_end_before_the_batch_is_used() -> None:
    loader = dealt(DataLoader(TensorDataset(torch.arange(10)), batch_size=3), 0, 2)
    ends = [loader.end_of_dataloader for _ in loader]
    assert ends == [False, True]
    assert loader.remainder == 4


def test_skipping_leaves_out_what_was_read() -> None:
    loader = dealt(DataLoader(TensorDataset(torch.arange(16)), batch_size=2), 0, 2)
    whole = [batch[0].tolist() for batch in loader]
    rest = skip_first_batches(loader, 3)
    assert [batch[0].tolist() for batch in rest] == whole[3:]
    assert (len(rest), rest.iteration, len(loader)) == (1, 2, 4)
    # As in Accelerate 1.15.0, whose loader that skips does not know how large its batches are.
    uneven = dealt(DataLoader(TensorDataset(torch.arange(15)), batch_size=2), 0, 2)
    for one, kept in ((uneven, 3), (skip_first_batches(uneven, 3), -1)):
        assert [one.remainder for _ in one][-1] == kept
    plain = skip_first_batches(DataLoader(range(6), batch_size=2), 1)  # pyright: ignore[reportArgumentType]
    assert [batch.tolist() for batch in plain] == [[2, 3], [4, 5]]


def test_what_cannot_be_dealt_out_is_refused() -> None:
    with pytest.raises(ConfigError, match="split_batches cuts each batch into 2 equal parts"):
        dealt(DataLoader(TensorDataset(torch.arange(4)), batch_size=3), 0, 2, split=True)
    with pytest.raises(ConfigError, match="has batch_size=None, so there are no batches"):
        dealt(DataLoader(TensorDataset(torch.arange(4)), batch_size=None), 0, 2)


def test_a_paced_scheduler_steps_once_for_each_rank() -> None:
    class Skipped:
        step_was_skipped = False

    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    state, followed = GradientState(GradientAccumulationPlugin()), Skipped()
    given: Any = [followed]

    def paced(*, split: bool = False) -> Paced:
        return Paced(scheduler, given, state, times=3, with_optimizer=True, split=split)

    optimizer.step()
    paced().step()
    assert paced().get_last_lr() == [0.125]
    state.sync_gradients = False
    paced().step()
    state.sync_gradients, followed.step_was_skipped = True, True
    paced().step()
    assert paced().get_last_lr() == [0.125]
    followed.step_was_skipped = False
    paced(split=True).step()
    assert paced().get_last_lr() == [0.0625]


class Sized(Stream):
    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize("samples", [1, 8, 11])
@pytest.mark.parametrize("drop", [False, True])
def test_a_stream_that_knows_its_length_has_accelerates(samples: int, drop: bool) -> None:
    theirs = pytest.importorskip("accelerate.data_loader")
    for rank in range(2):
        loader = DataLoader(Sized(samples), batch_size=2, drop_last=drop)
        mine = dealt(loader, rank, 2, dispatch=False)
        expected = theirs.IterableDatasetShard(
            loader.dataset, batch_size=2, drop_last=drop, num_processes=2, process_index=rank
        )
        assert mine.total_dataset_length == len(expected)
        assert len(mine) == len(list(mine)) == len(expected) // 2
        assert mine.total_batch_size == 2


def accelerates_loaders(config: dict[str, Any]) -> list[Any]:
    """What Accelerate's own loaders give on one rank, and what they leave of the generator."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    try:
        configuration = accelerate.DataLoaderConfiguration(**config)
        accelerator = accelerate.Accelerator(cpu=True, dataloader_config=configuration)
        state = accelerator.gradient_state
        return gone_over(accelerator.prepare, lambda loader: state.remainder)
    finally:
        accelerate.state.AcceleratorState._reset_state(True)


def gone_over(prepare: Any, remainder: Any) -> list[Any]:
    def seeded(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    torch.manual_seed(0)
    data, own, found = torch.arange(11), seeded(1), []
    for loader in (
        DataLoader(data, batch_size=4, shuffle=True, generator=own),  # pyright: ignore[reportArgumentType]
        DataLoader(data, batch_size=4, shuffle=True),  # pyright: ignore[reportArgumentType]
        DataLoader(data, batch_size=4, generator=own, drop_last=True),  # pyright: ignore[reportArgumentType]
        DataLoader(data, batch_sampler=[[1, 2], [3, 0]], generator=own),  # pyright: ignore[reportArgumentType]
        DataLoader(Stream(7), batch_size=2, generator=own),
    ):
        prepared = prepare(loader)
        for _ in range(2):
            for batch in prepared:
                kept = remainder(prepared) if prepared.end_of_dataloader else 0
                found.append((batch.tolist(), int(torch.get_rng_state().sum()), kept))
    return found


@pytest.mark.parametrize("dispatch", [None, False, True])
def test_a_generator_is_drawn_from_as_accelerate_draws(dispatch: bool | None) -> None:
    def prepare(loader: DataLoader) -> DealtLoader:
        return dealt(loader, 0, 1, dispatch=dispatch)

    expected = accelerates_loaders({"dispatch_batches": dispatch})
    assert gone_over(prepare, lambda loader: loader.remainder) == expected
