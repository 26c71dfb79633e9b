"""Streams: each rank keeps its slices of one stream, whatever workers and lengths there are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from unipar.data import Loader, Position
from unipar.errors import DataError


class Numbers(IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        epoch = self.epochs[-1] if self.epochs else 0
        yield from range(100 * epoch, 100 * epoch + self.n)


class Sized(Numbers):
    def __len__(self) -> int:
        return self.n


class SelfDividing(IterableDataset):
    """As PyTorch's documentation advises, and as Hugging Face's streams do."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        if info is None:
            return iter(range(12))
        return itertools.islice(range(12), info.id, None, info.num_workers)


class UsedUp(IterableDataset):
    """Forgets to begin again."""

    def __init__(self) -> None:
        self.numbers = iter(range(4))

    def __iter__(self) -> Iterator[int]:
        return self.numbers


def seen(loader: Loader) -> list[list[int]]:
    return [
        [i for micro in batch for i in micro.data.tolist()[: micro.num_samples]] for batch in loader
    ]


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("data", [Numbers(12), SelfDividing()], ids=["plain", "self-dividing"])
def test_workers_neither_repeat_nor_lose_samples_nor_change_the_order(data: Any, num_workers: int):
    shares = [
        seen(Loader(data, global_batch_size=4, data_rank=r, data_size=2, num_workers=num_workers))
        for r in range(2)
    ]
    assert shares == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_with_workers_continues_where_it_was(num_workers: int):
    loader = Loader(Numbers(14), global_batch_size=4, num_workers=num_workers)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    del batches
    resumed = Loader(Numbers(14), global_batch_size=4, num_workers=2 - num_workers)
    resumed.load_state_dict(state)
    assert seen(resumed) == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13]]
    assert resumed.position == Position(1, 0)


def test_persistent_workers_begin_each_epoch_anew():
    data = DataLoader(Numbers(6), batch_size=2, num_workers=2, persistent_workers=True)
    loader = Loader(data, global_batch_size=2)
    assert seen(loader) == [[0, 1], [2, 3], [4, 5]]
    assert seen(loader) == [[100, 101], [102, 103], [104, 105]]


SHUFFLES: dict[str, Callable[[], list[int]]] = {
    "python": lambda: random.sample(range(12), 12),
    "numpy": lambda: np.random.permutation(12).tolist(),
    "torch": lambda: torch.randperm(12).tolist(),
}


class SelfShuffled(IterableDataset):
    """Shuffles with a generator of the process, as many a stream does."""

    def __init__(self, shuffle: Callable[[], list[int]]) -> None:
        self.shuffle = shuffle

    def __iter__(self) -> Iterator[int]:
        return iter(self.shuffle())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("by", SHUFFLES)
def test_a_stream_that_shuffles_itself_is_the_same_on_every_rank(by: str, num_workers: int):
    def epochs(rank: int, ranks: int) -> list[list[list[int]]]:
        # Ranks are seeded differently, for dropout.
        random.seed(rank)
        np.random.seed(rank)
        torch.manual_seed(rank)
        loader = Loader(
            SelfShuffled(SHUFFLES[by]),
            global_batch_size=4,
            data_rank=rank,
            data_size=ranks,
            num_workers=num_workers,
        )
        return [seen(loader), seen(loader)]

    (whole,) = [epochs(0, 1)]
    shares = [epochs(rank, 2) for rank in range(2)]
    for epoch in range(2):
        joined = [a + b for a, b in zip(shares[0][epoch], shares[1][epoch], strict=True)]
        assert joined == whole[epoch]
        assert sorted(itertools.chain(*joined)) == list(range(12))
    assert whole[0] != whole[1]


@pytest.mark.parametrize("done", [1, 2, 3])
def test_the_noise_of_a_stream_continues_where_it_was(done: int):
    class Noise(IterableDataset):
        def __iter__(self) -> Iterator[tuple[float, float, float]]:
            for _ in range(15):
                yield random.gauss(0, 1), float(np.random.normal()), float(torch.randn(()))

    def noise(loader: Loader) -> list[list[list[float]]]:
        return [[column.tolist() for column in micro.data] for batch in loader for micro in batch]

    def loader() -> Loader:
        return Loader(Noise(), global_batch_size=3)

    first, rest = loader(), loader()
    for _ in itertools.islice(first, done):
        pass
    rest.load_state_dict(first.state_dict())
    assert noise(rest) == noise(loader())[done:]


@pytest.mark.parametrize("by", SHUFFLES)
def test_a_stream_that_shuffles_itself_continues_where_it_was(by: str):
    def loader() -> Loader:
        return Loader(SelfShuffled(SHUFFLES[by]), global_batch_size=4)

    whole, first, rest = loader(), loader(), loader()
    next(iter(first))
    rest.load_state_dict(first.state_dict())
    assert seen(rest) == seen(whole)[1:]


def test_reading_a_stream_leaves_the_generators_of_the_process_alone():
    def drawn() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), float(torch.rand(()))

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    expected = drawn()
    for shuffle in SHUFFLES.values():
        seed()
        list(Loader(SelfShuffled(shuffle), global_batch_size=4))
        assert drawn() == expected


def test_a_state_that_json_cannot_hold_is_refused():
    class Odd(Numbers):
        def state_dict(self) -> dict[str, Any]:
            return {"rng": torch.zeros(2)}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    loader = Loader(Odd(4), global_batch_size=2)
    next(iter(loader))
    with pytest.raises(DataError, match=r"state_dict\(\) of Odd cannot be saved as JSON.*tolist"):
        loader.state_dict()


def test_a_stream_is_told_the_epoch():
    data = Numbers(2)
    loader = Loader(data, global_batch_size=2)
    assert [seen(loader), seen(loader)] == [[[0, 1]], [[100, 101]]]
    assert data.epochs == [0, 1]


@pytest.mark.parametrize("kind", [Numbers, Sized])
def test_drop_last_leaves_the_ragged_batch_out(kind: type[Numbers]):
    loader = Loader(DataLoader(kind(7), batch_size=3, drop_last=True), global_batch_size=3)
    assert seen(loader) == [[0, 1, 2], [3, 4, 5]]
    assert loader.position == Position(1, 0)


def test_a_stream_that_knows_its_length_says_so():
    loader = Loader(Sized(7), global_batch_size=3)
    assert (loader.num_samples, loader.num_batches) == (7, 3)
    assert Loader(Numbers(7), global_batch_size=3).num_batches is None


def test_after_the_last_batch_comes_the_next_epoch():
    """Saved after the last step of an epoch, whose end nobody has seen yet."""
    loader = Loader(Numbers(4), global_batch_size=2)
    batches = iter(loader)
    next(batches)
    next(batches)
    state = loader.state_dict()
    resumed = Loader(Numbers(4), global_batch_size=2)
    resumed.load_state_dict(state)
    assert seen(resumed) == []
    assert seen(resumed) == [[100, 101], [102, 103]]


class Shuffled(IterableDataset):
    """A stream with a state that changes under it."""

    def __init__(self) -> None:
        self.state = {"read": 0}

    def __iter__(self) -> Iterator[int]:
        while self.state["read"] < 8:
            self.state["read"] += 1
            yield self.state["read"] - 1
        self.state = {"read": 0}

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


def test_a_saved_place_does_not_move_with_the_stream():
    loader = Loader(Shuffled(), global_batch_size=2)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    next(batches)
    assert state["stream"] == {"read": 2}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_empty_stream_is_an_error(num_workers: int):
    with pytest.raises(DataError, match=r"the stream \(Numbers\) is empty"):
        list(Loader(Numbers(0), global_batch_size=2, num_workers=num_workers))


def test_a_stream_that_does_not_begin_anew_is_an_error():
    loader = Loader(UsedUp(), global_batch_size=2)
    list(loader)
    with pytest.raises(DataError, match=r"no sample in epoch 1.*__iter__ must begin again"):
        list(loader)


def test_a_stream_shorter_than_a_full_batch_is_an_error_where_only_those_count():
    data = DataLoader(Numbers(2), batch_size=3, drop_last=True)
    with pytest.raises(DataError, match=r"no full global batch of 3, and .* drop_last=True"):
        list(Loader(data, global_batch_size=3))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_raises_is_named(num_workers: int):
    class Broken(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            yield from range(5)
            raise OSError("bad block")

    loader = Loader(
        Broken(), global_batch_size=2, data_rank=1, data_size=2, num_workers=num_workers
    )
    with pytest.raises(DataError, match=r"^rank 1: sample 5 of Broken raised OSError: bad block"):
        list(loader)


def test_a_sample_that_raises_after_a_resume_is_named_by_its_place_in_the_stream():
    class Broken(Shuffled):
        def __iter__(self) -> Iterator[int]:
            for number in super().__iter__():
                if number == 5:
                    raise ValueError("broken")
                yield number

    loader = Loader(Broken(), global_batch_size=2)
    next(iter(loader))
    state = loader.state_dict()
    resumed = Loader(Broken(), global_batch_size=2)
    resumed.load_state_dict(state)
    with pytest.raises(DataError, match="sample 5 of Broken raised ValueError: broken"):
        list(resumed)


def test_a_stream_that_does_not_take_its_saved_state_is_named():
    resumed = Loader(Shuffled(), global_batch_size=2)
    resumed.load_state_dict({"epoch": 0, "index": 1, "stream": 5})
    with pytest.raises(DataError, match=r"Shuffled does not take its saved state: .*TypeError"):
        list(resumed)


def test_augmentations_of_a_stream_do_not_draw_from_dropouts_generator():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    next(iter(Loader(Numbers(4), global_batch_size=2)))
    assert torch.equal(torch.rand(1), expected)
