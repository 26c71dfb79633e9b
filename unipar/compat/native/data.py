"""``DataLoader``: in a script that knows nothing of ranks, each has its share of every batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import data

from unipar.compat.adopting import adoption
from unipar.compat.run import current
from unipar.compat.sharing import SharedLoader
from unipar.errors import ConfigError


class DataLoader(data.DataLoader):
    """torch's. Where the script gives ranks no data of their own, it cuts up training batches."""

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(self, SharedLoader) or not self._is_cut():
            adoption.parts.read(None)
            return super().__iter__()
        shared = self.__dict__.get("_unipar_shared")
        if shared is None:
            shared = SharedLoader(self, current.world(), _read)
            self.__dict__["_unipar_shared"] = shared
        return _trained_on(iter(shared))

    def _is_cut(self) -> bool:
        if adoption.aware or current.placement().size == 1 or not torch.is_grad_enabled():
            return False
        models = adoption.models()
        if models and not any(one.module.training for one in models):
            return False
        return self.batch_sampler is not None and not isinstance(self.dataset, data.IterableDataset)


def _read(part: tuple[int, int]) -> None:
    adoption.parts.read(part)


def _trained_on(batches: Iterator[Any]) -> Iterator[Any]:
    """The batches of a loader.

    Raises:
        ConfigError: none of them was trained on, so what the script has made of them is of a part.
    """
    before = adoption.parts.uses
    yield from batches
    if adoption.parts.uses == before:
        raise ConfigError(
            "a DataLoader was read to its end, and no model was trained meanwhile: each rank has "
            "read its part of the data, so what the script makes of it differs between ranks. Read "
            "it under torch.no_grad(), or call model.eval() before, and every rank reads all."
        )
