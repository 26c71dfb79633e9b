"""Loaders as the plugins of Colossal-AI make them."""

from __future__ import annotations

import functools
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from unipar.migrated import script
from unipar.migrated.boosted.processes import set_seed


def loader(
    dataset: Dataset[Any],
    batch_size: int,
    shuffle: bool = False,
    seed: int = 1024,
    drop_last: bool = False,
    pin_memory: bool = False,
    num_workers: int = 0,
    **options: Any,
) -> DataLoader:
    """A loader of this rank's share, as ``plugin.prepare_dataloader`` makes it.

    Args:
        dataset: of samples.
        batch_size: samples of a batch on this rank.
        shuffle: whether each epoch has an order of its own; ``sampler.set_epoch`` says which.
        seed: of the processes that load samples.
        drop_last: whether a last batch that is not full is left out.
        pin_memory: as ``DataLoader`` takes it.
        num_workers: likewise.
        options: further arguments of ``DataLoader``.
    """
    ranks = script.world()
    sampler = DistributedSampler(
        dataset, num_replicas=ranks.data_size, rank=ranks.data_rank, shuffle=shuffle
    )
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        worker_init_fn=functools.partial(_seed_worker, seed),
        drop_last=drop_last,
        pin_memory=pin_memory,
        num_workers=num_workers,
        **options,
    )


def _seed_worker(seed: int, worker_id: int) -> None:
    set_seed(seed)
