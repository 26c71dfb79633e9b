"""One rank's share of the batches of a ``DataLoader``."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler, default_collate

from unipar.compat.loaders import settings_of
from unipar.compat.run import own_randomness
from unipar.errors import first_few
from unipar.world import World

log = logging.getLogger("unipar")

_Path = tuple[Any, ...]
_SINGLE = (str, bytes, int, float, complex, type(None))
_AHEAD = 256
"""How many batches rank 0 draws at once."""


class SharedLoader(DataLoader):
    """A loader with the order of another, of which each batch is cut up among the ranks.

    Rank 0 draws the order with the generators that the script has there, and tells the others. A
    batch smaller than the number of ranks leaves some without samples: they run its first one,
    which counts nothing. What the script puts batches together by, as by padding, is given whole
    ones, and what it gives is cut up.

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
        settings = settings_of(loader)
        own = not whole and settings["collate_fn"] is not default_collate
        if own:
            settings["collate_fn"] = _Cut(settings["collate_fn"], world.data_rank, world.data_size)
        self._shares = _Shares(loader.batch_sampler, world, whole=whole, cut=not own)
        super().__init__(loader.dataset, batch_sampler=self._shares, **settings)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        # A seed is drawn here, and the order with the first batch, as by torch's own.
        return self._batches(super().__iter__())

    def _batches(self, batches: Iterator[Any]) -> Iterator[Any]:
        for index, batch in enumerate(batches):
            self._tell(self._shares.counts[index])
            yield batch


class _Shares(Sampler[list[int]]):
    """This rank's part of each batch of a batch sampler."""

    def __init__(self, batches: Any, world: World, *, whole: bool, cut: bool) -> None:
        self._batches, self._world, self._whole, self._cut = batches, world, whole, cut
        self.counts: list[tuple[int, int]] = []
        self._reseeded = False
        self._marks: dict[str, str] = {}
        self._told = False

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
            begin, end = _part(len(batch), rank, size)
            self.counts.append((end - begin, len(batch)))
            yield batch[begin : max(end, begin + 1)] if self._cut else batch

    def _order(self) -> Iterator[list[int]]:
        """The batches as rank 0 draws them. It may draw them without end."""
        drawn = iter(self._batches) if self._world.is_main else iter(())
        while True:
            self._look()
            told = self._world.broadcast(list(itertools.islice(drawn, _AHEAD)))
            # What it changes by itself in drawing, it does on rank 0 alone.
            self._marks = _marks_of(self._batches)
            yield from told
            if len(told) < _AHEAD:
                return

    def _look(self) -> None:
        """Say where a script has given ranks unlike samplers, by what each has of batches."""
        marks = _marks_of(self._batches)
        changed = {name: one for name, one in marks.items() if self._marks.get(name) != one}
        first, *others = self._world.gather(changed)
        names = [name for name in first if any(one.get(name) != first[name] for one in others)]
        if names and self._world.is_main and not self._told:
            self._told = True
            log.warning(
                "the order of the data is drawn by what is another on each rank (%s), and rank 0's "
                "is taken. What is made of a batch is so of rank 0's part of it, and not as on one "
                "process.",
                first_few(names),
            )


def _marks_of(batches: Any) -> dict[str, str]:
    """Of what a batch sampler and its sampler hold, by its name, what tells it apart."""
    found: dict[str, str] = {}
    for one in (batches, getattr(batches, "sampler", None)):
        for name, value in getattr(one, "__dict__", {}).items():
            if isinstance(value, torch.Tensor):
                value = value.detach().tolist()
            elif isinstance(value, np.ndarray):
                value = value.tolist()
            if isinstance(value, (int, float, str, list, tuple, dict)):
                with contextlib.suppress(Exception):
                    data = pickle.dumps(value)
                    found[f"{type(one).__name__}.{name}"] = hashlib.sha256(data).hexdigest()
    return found


def _part(length: int, rank: int, size: int) -> tuple[int, int]:
    """Where a rank's part of a batch begins and ends; nothing is at the beginning."""
    begin, end = length * rank // size, length * (rank + 1) // size
    return (begin, end) if begin < end else (0, 0)


class _Cut:
    """Puts a whole batch together as the script does, and gives a rank's part of it.

    Along which dimension samples lie is seen by a batch that has one less. What else has another
    shape then, or in another batch, holds samples in a way that is not known, as the boxes of all
    images: each rank puts its part together.

    Args:
        collate: the script's.
        rank: of this process.
        size: the number of ranks.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], rank: int, size: int) -> None:
        self._collate, self._rank, self._size = collate, rank, size
        self._along: dict[_Path, int] | None = None
        self._others: dict[_Path, tuple[int, ...]] = {}
        self._ragged = False

    def __call__(self, samples: list[Any]) -> Any:
        length = len(samples)
        begin, end = _part(length, self._rank, self._size)
        end = max(end, begin + 1)
        if self._ragged:
            return self._collate(samples[begin:end])
        whole = self._collate(samples)
        if length == 1:
            return whole
        if self._along is None:
            self._along = {}
            # A sample may have nothing in what is ragged.
            for some in (samples[:-1], samples[1:], samples[:1]):
                with own_randomness(torch.device("cpu")):
                    self._look(whole, self._collate(some), (length, len(some)), ())
        part = self._cut(whole, begin, end, ())
        self._ragged |= not self._along
        if self._ragged and self._rank == 0:
            log.warning(
                "%s puts batches together to a %s, in %swhich samples are not found, so each rank "
                "puts its part together: padding and the like are not those of the whole batch. "
                "Give tensors whose first dimension is the batch, in tuples, lists or dicts.",
                getattr(self._collate, "__name__", "collate_fn"), type(whole).__name__,
                "parts of " * bool(self._along),
            )  # fmt: skip
        return self._collate(samples[begin:end]) if self._ragged else part

    def _look(self, whole: Any, less: Any, lengths: tuple[int, int], path: _Path) -> None:
        assert self._along is not None
        sizes, fewer = _sizes_of(whole), _sizes_of(less)
        if sizes is not None and fewer is not None:
            for dim, pair in enumerate(zip(sizes, fewer, strict=False)):
                if pair == lengths and self._along.setdefault(path, dim) == dim:
                    return
        if isinstance(whole, Mapping):
            for key in whole:
                self._look(whole[key], less[key], lengths, (*path, key))
        elif isinstance(whole, (list, tuple)):
            self._ragged |= len(whole) != len(less)
            for index, pair in enumerate(zip(whole, less, strict=False)):
                self._look(*pair, lengths, (*path, index))
        else:
            opaque = sizes is None and not isinstance(whole, _SINGLE)
            self._ragged |= opaque or sizes != fewer

    def _cut(self, value: Any, begin: int, end: int, path: _Path) -> Any:
        assert self._along is not None
        if (dim := self._along.get(path)) is not None:
            return value[(slice(None),) * dim + (slice(begin, end),)] if dim else value[begin:end]
        if isinstance(value, Mapping):
            found: Any = copy.copy(value)
            for key in value:
                found[key] = self._cut(value[key], begin, end, (*path, key))
            return found
        sizes = _sizes_of(value)
        if sizes is not None:
            self._ragged |= self._others.setdefault(path, sizes) != sizes
        if isinstance(value, (list, tuple)):
            parts = [self._cut(one, begin, end, (*path, i)) for i, one in enumerate(value)]
            made: Any = type(value)
            return made(*parts) if hasattr(value, "_fields") else made(parts)
        return value


def _sizes_of(value: Any) -> tuple[int, ...] | None:
    """The shape of a tensor or an array, the length of a list."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return tuple(shape)
    return (len(value),) if isinstance(value, (list, tuple)) else None
