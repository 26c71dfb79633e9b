"""One rank's share of the batches of a ``DataLoader``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from unipar.compat.loaders import settings_of
from unipar.world import World

_AHEAD = 256
"""How many batches rank 0 draws at once."""


class SharedLoader(DataLoader):
    """A loader with the order of another, of which each batch is cut up among the ranks.

    Rank 0 draws the order with the generators that the script has there, and tells the others. A
    batch smaller than the number of ranks leaves some without samples: they run its first one,
    which counts nothing.

    Args:
        loader: what the script has built; a batch of it is one over all ranks.
        world: the joined processes.
        whole: whether each rank has all of each batch, and the order alone is shared.
        tell: called with this rank's and all ranks' number of samples of each batch given out;
            with 0 for the latter where it is whole.
    """

    def __init__(
        self,
        loader: DataLoader,
        world: World,
        tell: Callable[[tuple[int, int]], None],
        *,
        whole: bool = False,
    ) -> None:
        self._world, self._tell = world, tell
        self._shares = _Shares(loader.batch_sampler, world, whole=whole)
        super().__init__(loader.dataset, batch_sampler=self._shares, **settings_of(loader))

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # A seed is drawn here, and the order with the first batch, as by torch's own.
        return self._batches(super().__iter__())

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        for index, batch in enumerate(batches):
            self._tell(self._shares.counts[index])
            yield batch


class _Shares(Sampler[list[int]]):
    """This rank's part of each batch of a batch sampler."""

    def __init__(self, batches: Any, world: World, *, whole: bool) -> None:
        self._batches, self._world, self._whole = batches, world, whole
        self.counts: list[tuple[int, int]] = []
        self._reseeded = False

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        rank, size = self._world.data_rank, self._world.data_size
        if not self._whole and not self._reseeded and rank > 0:
            # Dropout must differ between ranks; the first keeps the stream of the script.
            torch.manual_seed((torch.initial_seed() + 1_000_003 * rank) % 2**63)
        self._reseeded = True
        self.counts = []
        for batch in self._order():
            if self._whole:
                self.counts.append((len(batch), 0))
                yield batch
                continue
            begin, end = len(batch) * rank // size, len(batch) * (rank + 1) // size
            self.counts.append((end - begin, len(batch)))
            yield batch[begin:end] if begin < end else batch[:1]

    def _order(self) -> Iterator[list[int]]:
        """The batches as rank 0 draws them. It may draw them without end."""
        drawn = iter(self._batches) if self._world.is_main else iter(())
        while True:
            told = self._world.broadcast(list(itertools.islice(drawn, _AHEAD)))
            yield from told
            if len(told) < _AHEAD:
                return
