"""Loaders as Fabric sets them up: each rank has its share, in another order each time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from unipar.compat.loaders import settings_of
from unipar.data import move_to
from unipar.errors import ConfigError
from unipar.session import Session


class EpochLoader(DataLoader):
    """A loader that tells its sampler the epoch, and moves batches to a device.

    Args:
        loader: what the script has built.
        sampler: taken instead of the loader's.
        place: where batches are moved to.
    """

    def __init__(
        self, loader: DataLoader, sampler: DistributedSampler | None, place: torch.device | None
    ) -> None:
        settings: dict[str, Any] = settings_of(loader)
        if loader.batch_size is None and loader.batch_sampler is not None:
            settings["batch_sampler"] = loader.batch_sampler
        else:
            settings |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            if not isinstance(loader.dataset, IterableDataset):
                settings["sampler"] = sampler if sampler is not None else loader.sampler
        self._place, self._epoch = place, 0
        super().__init__(loader.dataset, **settings)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        samplers: tuple[Any, ...] = (self.sampler, getattr(self.batch_sampler, "sampler", None))
        for one in samplers:
            if hasattr(one, "set_epoch"):
                one.set_epoch(self._epoch)
        self._epoch += 1
        for batch in super().__iter__():
            yield batch if self._place is None else move_to(batch, self._place)


def share(
    loader: DataLoader, session: Session, place: torch.device | None, *, shared: bool
) -> EpochLoader:
    """This rank's share of a loader; all of it where one process trains alone.

    Args:
        loader: what the script has built.
        session: the run's.
        place: where batches are moved to; ``None`` leaves them.
        shared: whether ranks are to have other samples.

    Raises:
        ConfigError: its batches are made by hand.
    """
    own = isinstance(loader.sampler, DistributedSampler)
    streamed = isinstance(loader.dataset, IterableDataset)
    if not shared or own or streamed or session.strategy.name == "single":
        return EpochLoader(loader, None, place)
    plain = type(loader.batch_sampler) is BatchSampler
    if not plain or not isinstance(loader.sampler, (RandomSampler, SequentialSampler)):
        raise ConfigError(
            f"this DataLoader takes its samples from {type(loader.sampler).__name__} in batches "
            f"of {type(loader.batch_sampler).__name__}, which cannot be shared among ranks. "
            "Use shuffle=, or share them yourself and pass use_distributed_sampler=False."
        )
    sampler = DistributedSampler(
        loader.dataset,
        num_replicas=session.world.data_size,
        rank=session.world.data_rank,
        shuffle=isinstance(loader.sampler, RandomSampler),
        seed=int(os.environ.get("PL_GLOBAL_SEED", 0)),
    )
    return EpochLoader(loader, sampler, place)
