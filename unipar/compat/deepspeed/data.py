"""The loader that ``initialize(training_data=…)`` gives, and one that repeats another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from unipar.compat.run import current

_WORKERS = 2


class DeepSpeedDataLoader:
    """This rank's share of a dataset, in the same shuffled order in every epoch.

    That is DeepSpeed's, whose sampler is told of no epoch. ``data_sampler.set_epoch`` changes it.

    Args:
        dataset: with a length.
        batch_size: samples of a batch on this rank.
        collate_fn: makes a batch of samples; left out: torch's.
        num_local_io_workers: processes that load samples; left out: 2.
        data_sampler: left out: a shuffling one over the ranks.
        drop_last: whether a last, shorter batch is left out.

    Attributes:
        data_sampler: whose order it goes by.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        *,
        drop_last: bool = False,
    ) -> None:
        world = current.world()
        self.dataset, self.batch_size = dataset, batch_size
        if data_sampler is None:
            data_sampler = DistributedSampler(
                dataset, num_replicas=world.data_size, rank=world.data_rank
            )
        self.data_sampler = data_sampler
        self.dataloader = DataLoader(
            dataset, batch_size=batch_size, sampler=data_sampler, collate_fn=collate_fn,
            num_workers=_WORKERS if num_local_io_workers is None else num_local_io_workers,
            drop_last=drop_last, pin_memory=world.device.type == "cuda",
        )  # fmt: skip
        count = len(data_sampler) / batch_size
        self.len = math.floor(count) if drop_last else math.ceil(count)
        self.data: Iterator[Any] | None = None

    def __iter__(self) -> DeepSpeedDataLoader:
        self.data = iter(self.dataloader)
        return self

    def __next__(self) -> Any:
        if self.data is None:
            raise TypeError("this loader was not begun. Call iter(loader) before next(loader).")
        return next(self.data)

    def __len__(self) -> int:
        return self.len


class RepeatingLoader:
    """A loader that begins again at its end.

    Args:
        loader: anything that can be gone over again.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
