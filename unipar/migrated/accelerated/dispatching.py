"""Whole batches of a ``DataLoader``, dealt out to the ranks one by one, as Accelerate does it."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from unipar.data import move_to
from unipar.errors import ConfigError
from unipar.migrated.loaders import settings_of
from unipar.world import World


class DealtLoader(DataLoader):
    """One rank's batches of another loader, on the run's device.

    All ranks have as many batches of the same size: what is missing at the end is taken from the
    beginning, unless the loader drops its last batch. ``gathered`` says how many samples of the
    last round are no repetition.

    Args:
        loader: what the script has built.
        world: the joined processes.
        split: batches are cut up among ranks instead of being dealt out whole.
        even: whether the last round is filled up.
        place: whether batches are moved to the device.
        enter: called with this loader when it is gone over, and with nothing at its end.

    Attributes:
        at_end: whether the batch that was given out last is the last one.
        remainder: samples of the last round that count; 0 if all do, -1 where it is not known.

    Raises:
        ConfigError: the loader is of a stream, or its batches cannot be cut up.
    """

    def __init__(
        self,
        loader: DataLoader,
        world: World,
        *,
        split: bool,
        even: bool,
        place: bool,
        enter: Callable[[DealtLoader | None], None],
    ) -> None:
        self._world, self._enter, self._place = world, enter, place
        self.at_end, self.remainder, self.iteration, self.skipped = False, -1, 0, 0
        batches = _batches_of(loader, world)
        size = getattr(batches, "batch_size", None)
        if split and (size is None or size % world.data_size):
            raise ConfigError(
                f"split_batches cuts each batch into {world.data_size} equal parts, and this "
                f"DataLoader has batch_size {size}. Give it a multiple of the number of ranks."
            )
        self._generator = self._own_generator(batches)
        self._drop_last = bool(loader.drop_last)
        self.total_batch_size = None if size is None else size * (1 if split else world.data_size)
        dealt = _Dealt(batches, world, split=split, even=even) if world.data_size > 1 else batches
        super().__init__(loader.dataset, batch_sampler=dealt, **settings_of(loader))

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._generator is not None:
            state = self._generator.get_state() if self._world.is_main else None
            self._generator.set_state(self._world.broadcast(state))
        self.at_end, self.remainder = False, -1
        if not self._drop_last and self.total_batch_size:
            self.remainder = len(self.dataset) % self.total_batch_size  # pyright: ignore
        self._enter(self)
        self.set_epoch(self.iteration)
        following = enumerate(super().__iter__())
        now = next(following, None)
        while now is not None:
            # One batch ahead, for what follows the last batch is asked before it is used.
            index, batch = now
            if self._place:
                batch = move_to(batch, self._world.device)
            now = next(following, None)
            self.at_end = now is None
            if index >= self.skipped:
                yield batch
        self.iteration += 1
        self._enter(None)

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler and the dataset which epoch comes next."""
        self.iteration = epoch
        inner = getattr(self.batch_sampler, "batches", self.batch_sampler)
        places: tuple[Any, ...] = (inner, getattr(inner, "sampler", None), self.dataset)
        for one in places:
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)

    def _own_generator(self, batches: Any) -> torch.Generator | None:
        """The generator that shuffles, which all ranks are to have in the same state."""
        sampler: Any = getattr(batches, "sampler", None)
        if self._world.data_size == 1 or not hasattr(sampler, "generator"):
            return None
        if sampler.generator is None:
            sampler.generator = torch.Generator()
            sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
        return sampler.generator


def skip_first_batches(loader: DealtLoader, num_batches: int = 0) -> DealtLoader:
    """The loader without the first batches; the original is left as it is."""
    skipping = copy.copy(loader)
    skipping.skipped = num_batches
    return skipping


class _Dealt(Sampler[list[int]]):
    """This rank's batches of a batch sampler."""

    def __init__(self, batches: BatchSampler, world: World, *, split: bool, even: bool) -> None:
        self.batches, self._split, self._even = batches, split, even
        self._rank, self._size = world.data_rank, world.data_size
        self.batch_size = batches.batch_size
        self.drop_last = bool(getattr(batches, "drop_last", False))

    def __len__(self) -> int:
        full, rest = divmod(len(self.batches), 1 if self._split else self._size)
        if not rest or self.drop_last:
            return full
        return full + 1 if self._even or self._rank < rest else full

    def __iter__(self) -> Iterator[list[int]]:
        each = self.batch_size // self._size if self._split else self.batch_size
        whole = each * self._size
        first: list[int] = []
        batches = iter(self.batches)
        while True:
            taken = list(itertools.islice(batches, 1 if self._split else self._size))
            now = list(itertools.chain.from_iterable(taken))
            first = first or now
            if len(now) < whole:
                break
            yield now[each * self._rank : each * (self._rank + 1)]
        if not now or self.drop_last:
            return
        if self._even:
            now += itertools.islice(itertools.cycle(first), whole - len(now))
        part = now[each * self._rank : each * (self._rank + 1)]
        if part:
            yield part


def _batches_of(loader: DataLoader, world: World) -> Any:
    streamed = isinstance(loader.dataset, IterableDataset)
    batches = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    known = hasattr(batches, "batch_size") or world.data_size == 1
    if (world.data_size > 1 and (streamed or not known)) or batches is None:
        raise ConfigError(
            f"this DataLoader goes over {type(loader.dataset).__name__} in batches that "
            f"{type(batches).__name__} makes, which cannot be dealt out to {world.data_size} "
            "ranks. Use a map-style dataset and a batch_size, or run on one process."
        )
    return batches
