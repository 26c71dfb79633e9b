"""``DataLoader``: in a script that knows nothing of ranks, each has its share of every batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import data

from unipar.compat.adopting import adoption
from unipar.compat.run import current
from unipar.compat.sharing import SharedLoader

log = logging.getLogger("unipar")


class DataLoader(data.DataLoader):
    """torch's. Where the script gives ranks no data of their own, it cuts up training batches."""

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if isinstance(self, SharedLoader) or not self._is_cut():
            return super().__iter__()
        shared = self.__dict__.get("_unipar_shared")
        if shared is None:
            shared = SharedLoader(self, current.world(), _tell)
            self.__dict__["_unipar_shared"] = shared
        return iter(shared)

    def _is_cut(self) -> bool:
        if adoption.aware or current.placement().size == 1 or not torch.is_grad_enabled():
            return False
        models = adoption.models()
        if models and not any(one.module.training for one in models):
            return False
        return self.batch_sampler is not None and not isinstance(self.dataset, data.IterableDataset)


def _tell(share: tuple[int, int] | None) -> None:
    adoption.share = share
