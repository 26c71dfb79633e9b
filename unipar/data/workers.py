"""The processes that load samples: their settings, and their end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from unipar.data.sources import Source

_OF_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


@contextlib.contextmanager
def items_of(loader: DataLoader) -> Iterator[Iterator[Any]]:
    """Go through a DataLoader, and end its processes.

    An error's traceback holds the iterator until the garbage collector comes, which closes pipes
    in any order. torch 2.13 (``_MultiProcessingDataLoaderIter.__del__``) then uses a closed one,
    and a thread of its queue closes whatever file has been opened in its place.
    """
    items = iter(loader)
    try:
        yield items
    finally:
        if isinstance(items, _MultiProcessingDataLoaderIter) and not loader.persistent_workers:
            items._shutdown_workers()


def loading_settings(
    source: Source, num_workers: int | None, pin_memory: bool | None
) -> dict[str, Any]:
    """The settings of a DataLoader: the source's, but for what is given here."""
    settings = dict(source.settings)
    if num_workers is not None:
        settings["num_workers"] = num_workers
        if num_workers == 0:
            for name in _OF_WORKERS:
                settings.pop(name, None)
    if pin_memory is not None:
        settings["pin_memory"] = pin_memory
    settings["pin_memory"] = bool(settings.get("pin_memory")) and torch.cuda.is_available()
    if settings.get("num_workers"):
        settings["worker_init_fn"] = _InWorker(settings.get("worker_init_fn"))
    return settings


class _InWorker:
    """Has ``get_worker_info().dataset`` be the user's, and calls his ``worker_init_fn``."""

    def __init__(self, init: Callable[[int], Any] | None) -> None:
        self._init = init

    def __call__(self, worker: int) -> None:
        info: Any = get_worker_info()
        # torch 2.8 has it forbid that (utils/data/_utils/worker.py).
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._init is not None:
            self._init(worker)
