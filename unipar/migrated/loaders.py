"""What a ``DataLoader`` was built with."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


def settings_of(loader: DataLoader) -> dict[str, Any]:
    """What a loader was built with, apart from its data and batches."""
    settings: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "generator": loader.generator,
    }
    if loader.num_workers:
        settings["prefetch_factor"] = loader.prefetch_factor
        settings["persistent_workers"] = loader.persistent_workers
        settings["multiprocessing_context"] = loader.multiprocessing_context
    return settings
