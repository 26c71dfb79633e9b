"""Data that cannot be trained on says so: what, where, and what to do."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from unipar.data import Loader
from unipar.errors import DataError


class Faulty:
    """Eight samples, the sixth of which is broken."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            raise ValueError("image 5 is truncated")
        return torch.tensor(index)


class FaultyBulk(Faulty):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[i] for i in indices]


class BrokenBulk(Faulty):
    """Samples can be had one by one, and not together."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        raise ValueError("no such table")


class Late(Faulty):
    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(20)
        raise AssertionError("unreachable")


class Deadly(Faulty):
    def __getitem__(self, index: int) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


def shown(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def everything(data: Any, size: int = 4, **kwargs: Any) -> list[Any]:
    return list(Loader(data, global_batch_size=size, shuffle=False, **kwargs))


def test_no_samples():
    with pytest.raises(DataError, match=r"the data \(list\) is empty: it has 0 samples.*filter"):
        Loader([], global_batch_size=1)


def test_fewer_samples_than_a_batch():
    with pytest.raises(
        DataError, match=r"has 3 samples, fewer than one global batch of 4.*at most 3"
    ):
        Loader([1, 2, 3], global_batch_size=4)


def test_columns_given_as_a_list_get_a_hint():
    with pytest.raises(DataError, match=r"for columns such as inputs and targets, pass a tuple"):
        Loader([torch.zeros(9), torch.zeros(9)], global_batch_size=4)


@pytest.mark.parametrize("kind", [Faulty, FaultyBulk])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_raises_is_named_with_its_rank_and_traceback(
    kind: type[Faulty], num_workers: int
):
    message = rf"^rank 1: sample 5 of {kind.__name__} raised ValueError: image 5 is truncated\."
    with pytest.raises(DataError, match=message) as caught:
        everything(kind(), 8, data_rank=1, data_size=2, num_workers=num_workers)
    assert "\n" not in str(caught.value)
    assert 'raise ValueError("image 5 is truncated")' in shown(caught.value)


@pytest.mark.parametrize("batches_made_differently", [False, True])
def test_workers_end_with_the_error_that_is_still_held(batches_made_differently: bool):
    data = [torch.tensor(1)] * 8 + [torch.tensor(1.5)] * 8 if batches_made_differently else Faulty()
    before = {*multiprocessing.active_children()}
    with pytest.raises(DataError) as held:
        everything(data, 8, num_workers=2)
    assert {*multiprocessing.active_children()} <= before
    assert held.value.__traceback__ is not None


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_of_different_shapes_are_described(num_workers: int):
    data = [torch.zeros(3), torch.zeros(4)]
    message = r"2 samples do not make a batch .*They are: float32\[3\]; float32\[4\]. Pad them"
    with pytest.raises(DataError, match=message):
        everything(data, 2, num_workers=num_workers)


def test_batches_of_different_keys_are_described():
    data = [{"x": 1, "y": 1}] * 4 + [{"x": 1}] * 4
    with pytest.raises(DataError, match=r"batch 1 of epoch 0 is made differently") as caught:
        everything(data)
    assert "it is {x: int64}, and they were {x: int64, y: int64}" in str(caught.value)


def test_the_order_of_keys_is_no_difference():
    everything([{"x": 1, "y": 1}] * 4 + [{"y": 1, "x": 1}] * 4)


def test_batches_of_different_types_are_described():
    data = [torch.tensor(1)] * 4 + [torch.tensor(1.5)] * 4
    with pytest.raises(DataError, match="it is float32, and they were int64"):
        everything(data)


@pytest.mark.parametrize("length", [5, 7])
def test_batches_with_an_item_for_each_sample_may_differ_in_length(length: int):
    """What detection models take: images and boxes that are not stacked."""
    data = [(torch.zeros(3, 4 + i), {"boxes": torch.zeros(i, 4)}) for i in range(length)]
    batches = everything(data, 3, collate_fn=lambda samples: tuple(zip(*samples, strict=True)))
    assert [batch.global_num_samples for batch in batches] == [3] * (length // 3) + [length % 3]


def test_an_item_more_is_a_difference_where_items_are_not_samples():
    def collate(samples: list[int]) -> list[torch.Tensor]:
        return [torch.tensor(samples)] * (2 if 0 in samples else 3)

    with pytest.raises(DataError, match=r"it is list\(int64, int64, int64\), and they were list\("):
        everything([0, 1, 2, 3, 4, 5, 6, 7], 4, collate_fn=collate)


def test_a_batch_that_is_refused_is_still_to_come():
    loader = Loader([1] * 4 + [1.5] * 4, global_batch_size=4, shuffle=False)
    with pytest.raises(DataError, match="batch 1 of epoch 0"):
        list(loader)
    assert loader.position.index == 1


def test_a_bulk_fetch_that_raises_is_not_worked_around():
    message = r"__getitems__ of BrokenBulk raised ValueError: no such table, for samples \[0, 1"
    with pytest.raises(DataError, match=message):
        everything(BrokenBulk())


def test_a_data_loaders_timeout_is_reported():
    data = DataLoader(Late(), batch_size=2, num_workers=1, timeout=1)  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError, match=r"rank 0: no batch came within .* timeout of 1 s"):
        everything(data, 2)


def test_a_killed_worker_process_is_reported():
    with pytest.raises(DataError, match=r"data-loading process of rank 0 ended unexpectedly") as e:
        everything(Deadly(), num_workers=1)
    assert "lower num_workers" in str(e.value)


def test_an_interrupt_is_no_data_error():
    class Interrupted(Faulty):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        everything(Interrupted())
