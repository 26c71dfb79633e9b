"""Data of a migrated script: a batch over all ranks, and each rank's share of it."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

from unipar.compat.sharing import SharedLoader
from unipar.errors import ConfigError
from unipar.migrated.script.run import current, world


def split(loader: DataLoader) -> DataLoader:
    """Let each rank have its share of each batch, in the order that the loader has on one rank.

    On one rank the loader itself. ``batch_size`` stays what it is over all ranks.

    Raises:
        ConfigError: the loader is of a stream, or its batches are built by hand.
    """
    ranks = world()
    if ranks.data_size == 1:
        return loader
    if loader.batch_sampler is None or isinstance(loader.dataset, torch.utils.data.IterableDataset):
        raise ConfigError(
            f"this DataLoader goes over {type(loader.dataset).__name__} without a batch sampler, "
            f"which cannot be divided among {ranks.data_size} ranks. "
            "Use a map-style dataset and a batch_size, or run on one process."
        )
    return SharedLoader(loader, ranks, _set_share)


def _set_share(share: tuple[int, int] | None) -> None:
    current.share = share
