"""Loaders as Fabric sets them up: each rank has its share, in another order each time."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
)

from unipar.compat.fabric.seeding import pl_worker_init_function
from unipar.data import move_to
from unipar.errors import ConfigError
from unipar.world import World

_OR_SHARE = "or share samples yourself and pass use_distributed_sampler=False."
_OF_TORCH = frozenset(vars(DataLoader(TensorDataset())))
"""The attributes of a loader that its class adds none to."""


class FabricDataLoader(DataLoader):
    """A loader that tells its samplers the epoch, and moves batches to a device.

    Args:
        loader: goes over the data; may be of a class of the script's own.
        device: where batches are moved to; ``None`` leaves them.
    """

    # Not torch's own constructor: everything is the loader's, which goes over the data.
    def __init__(self, loader: DataLoader, device: torch.device | None) -> None:
        self.__dict__.update(loader.__dict__)
        self.__dict__ |= {"_loader": loader, "_place": device, "_epoch": 0}

    @property
    def device(self) -> torch.device | None:
        """Where batches are moved to."""
        return self.__dict__["_place"]

    def __len__(self) -> int:
        return len(self.__dict__["_loader"])

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # A batch sampler of the script's own is told by the script, or counts by itself.
        told: tuple[Any, ...] = (self.sampler, getattr(self.batch_sampler, "sampler", None))
        for one in told:
            if callable(getattr(one, "set_epoch", None)):
                one.set_epoch(self._epoch)
        self._epoch += 1
        for batch in self.__dict__["_loader"]:
            yield batch if self.device is None else move_to(batch, self.device)

    def __getattr__(self, name: str) -> Any:
        if "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["_loader"], name)


def set_up(
    loader: DataLoader, world: World, device: torch.device | None, *, shared: bool
) -> FabricDataLoader:
    """This rank's share of a loader.

    Args:
        loader: what the script has built.
        world: the joined processes.
        device: where batches are moved to; ``None`` leaves them.
        shared: whether ranks are to have other samples.

    Raises:
        ConfigError: its batches are made by hand.
    """
    shares = isinstance(loader.sampler, DistributedSampler)
    if shared and not shares and not isinstance(loader.dataset, IterableDataset):
        loader = _shared(loader, world)
    if int(os.environ.get("PL_SEED_WORKERS", 0)) and loader.worker_init_fn is None:
        loader.worker_init_fn = functools.partial(pl_worker_init_function, rank=world.rank)
    return FabricDataLoader(loader, device)


def _shared(loader: DataLoader, world: World) -> DataLoader:
    batches = loader.batch_sampler
    # A class of the script's own may put its own in the place of what batch_size asks for.
    by_hand = loader.batch_size is None or type(batches) is not BatchSampler
    if batches is not None and by_hand:
        # lightning_fabric 2.6.6 makes batches of one sample of a plain BatchSampler.
        raise ConfigError(
            f"this DataLoader has batches of a {type(batches).__name__}, which cannot be shared "
            f"among ranks. Use batch_size= and sampler= or shuffle=, {_OR_SHARE}"
        )
    begun = [
        name
        for name, value in vars(loader).items()
        if isinstance(value, Iterator) and name not in _OF_TORCH
    ]
    if begun:
        raise ConfigError(
            f"this {type(loader).__name__} has an iterator over all samples, {', '.join(begun)}, "
            f"which it has made before. Make it in __iter__, {_OR_SHARE}"
        )
    named: dict[str, Any] = {
        "num_replicas": world.data_size, "rank": world.data_rank,
        "shuffle": isinstance(loader.sampler, RandomSampler),
        "seed": int(os.environ.get("PL_GLOBAL_SEED", 0)),
    }  # fmt: skip
    if isinstance(loader.sampler, (RandomSampler, SequentialSampler)):
        sampler: Any = DistributedSampler(loader.dataset, **named)
    else:
        sampler = _SharedSampler(loader.sampler, **named)
    # A copy, so that a class of the script's own stays; torch guards these attributes.
    shared = copy.copy(loader)
    shared.__dict__["sampler"] = sampler
    # torch 2.13 goes on with that of workers that persist, which goes over all samples.
    shared.__dict__["_iterator"] = None
    if batches is not None:
        again = BatchSampler(sampler, loader.batch_size or 1, loader.drop_last)
        shared.__dict__["batch_sampler"] = again
    return shared


class _SharedSampler(DistributedSampler):
    """One rank's share of what a sampler of the script's own gives.

    Every rank goes over the sampler, which has to give each the same.

    Args:
        sampler: the script's.
        named: of ``DistributedSampler``.
    """

    def __init__(self, sampler: Any, **named: Any) -> None:
        if not hasattr(sampler, "__len__"):
            raise ConfigError(
                f"this DataLoader has a {type(sampler).__name__} without __len__, which cannot be "
                f"shared among ranks. Define it, {_OR_SHARE}"
            )
        self._sampler = sampler
        super().__init__(_Drawn(sampler), **named)

    def __iter__(self) -> Iterator[Any]:
        drawn = list(self._sampler)
        return (drawn[index] for index in super().__iter__())

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        if callable(getattr(self._sampler, "set_epoch", None)):
            self._sampler.set_epoch(epoch)


class _Drawn(Dataset):
    """What a sampler gives, of which only the number is asked."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)
