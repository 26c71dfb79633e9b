"""What is taken as data, and what of a ``DataLoader`` is kept."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ChainDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from unipar.data import Loader, batch_size_of, num_samples_of
from unipar.errors import ConfigError, DataError


class Bulk:
    """Fetches a list of samples at once, as Hugging Face data sets do."""

    def __init__(self) -> None:
        self.bulks: list[list[int]] = []

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, int]:
        raise AssertionError("the bulk fetch is there to be used")

    def __getitems__(self, indices: list[int]) -> list[dict[str, int]]:
        self.bulks.append(list(indices))
        return [{"x": i, "y": 10 * i} for i in indices]


class Numbers(Dataset):
    """The numbers from 0."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(10)


def first(data: Any, **kwargs: Any) -> Any:
    batch = next(iter(Loader(data, global_batch_size=2, **{"shuffle": False, **kwargs})))
    return batch.microbatches[0].data


def test_a_tensor_holds_samples_along_its_first_dim():
    assert first(torch.arange(6).reshape(3, 2)).tolist() == [[0, 1], [2, 3]]


def test_a_tuple_of_tensors_holds_columns():
    x, y = first((torch.arange(3), torch.arange(3) * 10))
    assert (x.tolist(), y.tolist()) == ([0, 1], [0, 10])


def test_a_list_holds_samples():
    batch = first([{"x": torch.tensor(i), "name": f"n{i}"} for i in range(3)])
    assert batch["x"].tolist() == [0, 1]
    assert batch["name"] == ["n0", "n1"]


def test_an_array_holds_samples():
    assert first(np.arange(4)).tolist() == [0, 1]


def test_a_bulk_fetch_is_used_where_there_is_one():
    data = Bulk()
    batch = first(data)
    assert batch["y"].tolist() == [0, 10]
    assert data.bulks[0] == [0, 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_collate_function_draws_is_its_own_and_seeded(rank: int) -> None:
    def drawn(epochs: int, seed: int = 0) -> list[tuple[float, ...]]:
        def collate(samples: list[int]) -> list[tuple[float, ...]]:
            return [(random.random(), np.random.rand(), torch.rand(()).item())]

        loader = Loader(
            list(range(8)), global_batch_size=4, data_rank=rank, data_size=2, seed=seed,
            collate_fn=collate,
        )  # fmt: skip
        found = []
        for _ in range(epochs):
            found += [one for batch in loader for micro in batch for one in micro.data]
        return found

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    found = drawn(2)
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == expected
    assert len(set(found)) == len(found) == 4
    assert drawn(2) == found
    assert not set(drawn(2, seed=1)) & set(found)


def test_a_collate_function_makes_the_batch():
    assert first(list(range(4)), collate_fn=lambda samples: ("mine", samples)) == ("mine", [0, 1])


def test_a_data_loader_keeps_its_parts_and_not_its_order(caplog: pytest.LogCaptureFixture):
    data = DataLoader(
        Numbers(8), batch_size=4, shuffle=True, collate_fn=lambda samples: ("own", samples)
    )
    with caplog.at_level(logging.INFO, logger="unipar.data"):
        loader = Loader(data, global_batch_size=4)
        Loader(data, global_batch_size=4, data_rank=1, data_size=2)
        num_samples_of(data)
    assert caplog.text.count("unipar decides the order") == 1
    kinds, orders = zip(*[batch.microbatches[0].data for batch in loader], strict=True)
    assert set(kinds) == {"own"}
    assert sorted(orders[0] + orders[1]) == list(range(8))
    assert batch_size_of(data) == 4
    assert num_samples_of(data) == 8


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_generator_that_does_not_shuffle_is_a_warning(
    shuffle: bool, caplog: pytest.LogCaptureFixture
):
    data = DataLoader(Numbers(8), batch_size=4, shuffle=shuffle, generator=torch.Generator())
    Loader(data, global_batch_size=4)
    assert ("the order, by seed" in caplog.text) is shuffle


def test_a_data_loader_without_shuffling_keeps_the_order():
    data = DataLoader(Numbers(6), batch_size=2)
    seen = [batch.microbatches[0].data.tolist() for batch in Loader(data, global_batch_size=3)]
    assert seen == [[0, 1, 2], [3, 4, 5]]


def test_a_data_loaders_drop_last_leaves_the_ragged_batch_out():
    data = DataLoader(Numbers(7), batch_size=2, drop_last=True)
    loader = Loader(data, global_batch_size=3)
    assert loader.num_batches == 2
    assert sum(batch.global_num_samples for batch in loader) == 6
    assert loader.position.epoch == 1


@pytest.mark.parametrize("persistent", [False, True])
def test_a_data_loaders_workers_are_kept(persistent: bool):
    class Where(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            info = torch.utils.data.get_worker_info()
            return -1 if info is None else info.id

    data = DataLoader(Where(), batch_size=1, num_workers=2, persistent_workers=persistent)
    loader = Loader(data, global_batch_size=1)
    for _ in range(2):
        assert {int(batch.microbatches[0].data) for batch in loader} == {0, 1}
    workers = Loader(data, global_batch_size=1, num_workers=0)
    assert {int(batch.microbatches[0].data) for batch in workers} == {-1}


def test_no_workers_are_asked_for_over_a_data_loader_that_waits_for_them():
    data = DataLoader(Numbers(4), batch_size=2, num_workers=1, timeout=5, prefetch_factor=2)
    assert first(data, num_workers=0).tolist() == [0, 1]


SAMPLERS: dict[str, Callable[[Dataset], DataLoader]] = {
    "sampler=WeightedRandomSampler": lambda d: DataLoader(
        d, batch_size=2, sampler=WeightedRandomSampler([1.0] * 6, 6)
    ),
    "RandomSampler with replacement": lambda d: DataLoader(
        d,
        batch_size=2,
        sampler=RandomSampler(d, replacement=True),  # pyright: ignore[reportArgumentType]
    ),
    "RandomSampler with replacement or num_samples": lambda d: DataLoader(
        d,
        batch_size=2,
        sampler=RandomSampler(d, num_samples=3),  # pyright: ignore[reportArgumentType]
    ),
    "batch_sampler=Pairs": lambda d: DataLoader(
        d,
        batch_sampler=Pairs(SequentialSampler(d), 2, False),  # pyright: ignore[reportArgumentType]
    ),
    "sampler=SequentialSampler over a part of the dataset": lambda d: DataLoader(
        d, batch_size=2, sampler=SequentialSampler(range(4))
    ),
    "batch_size=None": lambda d: DataLoader(d, batch_size=None),
}


class Pairs(BatchSampler):
    """Somebody's own."""


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_of_ones_own_is_refused_with_the_way_to_express_it(name: str):
    with pytest.raises(DataError, match=r"Subset\(dataset, indices\)") as caught:
        Loader(SAMPLERS[name](TensorDataset(torch.arange(6))), global_batch_size=2)
    assert name in str(caught.value)


def test_a_distributed_sampler_is_refused_as_not_needed():
    data = TensorDataset(torch.arange(6))
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    with pytest.raises(DataError, match=r"unipar divides the data among ranks itself\. Leave"):
        Loader(DataLoader(data, batch_size=2, sampler=sampler), global_batch_size=2)


def test_a_stream_that_makes_its_own_batches_is_refused():
    with pytest.raises(DataError, match=r"batch_size=None, so its stream makes its own batches"):
        Loader(DataLoader(Stream(), batch_size=None), global_batch_size=2)


def test_a_chain_of_streams_without_lengths_has_none():
    loader = Loader(ChainDataset([Stream(), Stream()]), global_batch_size=8)
    assert loader.num_samples is None
    assert [batch.global_num_samples for batch in loader] == [8, 8, 4]


def test_what_the_message_says_instead_of_a_sampler_works():
    data = Subset(Numbers(6), [5, 5, 1, 0])
    loader = Loader(data, global_batch_size=2, shuffle=False)
    assert [b.microbatches[0].data.tolist() for b in loader] == [[5, 5], [1, 0]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((torch.zeros(3), torch.zeros(4)), r"columns of equal length, and these have \[3, 4\]"),
        ({"x": torch.zeros(3)}, "a mapping, which has no samples by index. Pass a tuple"),
        ((np.zeros(3), [1, 2, 3]), r"this one holds \['list', 'ndarray'\]. Make tensors"),
        ((), "this one holds nothing"),
        ("train.csv", r"the text 'train.csv', and a dataset is wanted. Read the file"),
        (iter([1, 2]), "list_iterator, which is none of: .*Wrap it in"),
        (None, "NoneType, which is none of"),
    ],
    ids=["ragged columns", "mapping", "other columns", "no columns", "text", "iterator", "none"],
)
def test_what_is_no_data_is_refused(data: Any, message: str):
    with pytest.raises(DataError, match=message):
        Loader(data, global_batch_size=1)


def test_a_stream_cannot_be_shuffled():
    with pytest.raises(ConfigError, match="shuffle=True needs a dataset with indices"):
        Loader(Stream(), global_batch_size=2, shuffle=True)


class Augmented(Dataset):
    """Each sample is its index, and three random numbers."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([float(index), *drawn], dtype=torch.float64)


class AugmentedTogether(Augmented):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


def augmented(
    size: int, workers: int, *, kind: type[Dataset] = Augmented, stops: bool = False
) -> list[list[float]]:
    """Of two epochs all samples by epoch and index; read by two loaders, if the first stops."""
    found: list[list[float]] = []
    for rank in range(size):
        make = functools.partial(
            Loader, kind(), global_batch_size=4, shuffle=True, micro_batch_size=2, seed=3,
            data_rank=rank, data_size=size, num_workers=workers,
        )  # fmt: skip
        loader, batches = make(), []
        if stops:
            batches.append(next(iter(loader)))
            stored, loader = loader.state_dict(), make()
            loader.load_state_dict(stored)
        batches += [batch for _ in range(2) for batch in loader]
        for batch in batches:
            for part in batch.microbatches:
                found += [[batch.epoch, *row] for row in part.data.tolist()]
    return sorted(found)


@pytest.mark.parametrize("kind", [Augmented, AugmentedTogether])
def test_random_augmentations_are_the_samples_own(kind: type[Dataset]) -> None:
    """Neither ranks nor workers nor a new start change them; an epoch does."""
    expected = augmented(1, 0)
    drawn = [number for _, _, *numbers in expected for number in numbers]
    assert len(set(drawn)) == len(drawn) == 2 * 12 * 3
    for size, workers in ((2, 0), (1, 2), (2, 1)):
        assert augmented(size, workers, kind=kind) == expected
    assert augmented(1, 0, kind=kind, stops=True) == expected


def test_augmentations_take_nothing_from_the_random_numbers_of_training() -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    found = []
    for _ in Loader(Augmented(), global_batch_size=6):
        found.append(torch.rand(()))
    torch.testing.assert_close(torch.stack(found), expected)


def worker_info() -> Any:
    return get_worker_info()


class Jittered(Dataset):
    """Draws by a generator of its own, which each worker is to make anew."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(worker_info().id), float(self.generator.random())])


def set_up(worker: int) -> None:
    dataset = worker_info().dataset
    assert len(dataset) == 8
    dataset.generator = np.random.default_rng(worker)


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_function_of_workers_finds_the_dataset_that_was_given(context: str) -> None:
    data = DataLoader(
        Jittered(), num_workers=2, worker_init_fn=set_up, multiprocessing_context=context
    )
    found = [batch.microbatches[0].data for batch in Loader(data, global_batch_size=1)]
    expected = [np.random.default_rng(worker) for worker in (0, 1)]
    for row in torch.cat(found).tolist():
        assert row[1] == pytest.approx(expected[int(row[0])].random())


class Numbered(IterableDataset):
    """As in the example of torch's page of data loading."""

    def __init__(self) -> None:
        self.start, self.end = 0, 8

    def __iter__(self) -> Any:
        return iter(range(self.start, self.end))


def divide(worker: int) -> None:
    dataset = worker_info().dataset
    dataset.end = dataset.start + 4


def test_a_function_that_divides_a_stream_among_workers_is_refused() -> None:
    data = DataLoader(Numbered(), num_workers=2, worker_init_fn=divide)
    with pytest.raises(DataError, match=r"uses get_worker_info\(\).dataset.start, of a stream"):
        next(iter(Loader(data, global_batch_size=2)))
