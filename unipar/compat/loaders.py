"""The arguments that a ``DataLoader`` was built with."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from unipar.data.sources import worker_settings


def settings_of(loader: DataLoader) -> dict[str, Any]:
    """Return the settings that a loader was built with, apart from its data and batches."""
    return {
        "collate_fn": loader.collate_fn,
        "generator": loader.generator,
        **worker_settings(loader),
    }
