"""A script's ``DataLoader`` shared among ranks, batch by batch, as Accelerate does it."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler

from unipar.compat.accelerate.operations import holds_tensors_only
from unipar.compat.accelerate.streams import ShardedStream, dispatched, length_of
from unipar.compat.loaders import settings_of
from unipar.compat.tables import Table
from unipar.data import move_to
from unipar.errors import ConfigError
from unipar.world import World

Enter = Callable[["DealtLoader", bool], None]
"""Called with a loader when it is gone over, and at its end."""


class DealtLoader(DataLoader):
    """One rank's batches of another loader, on the run's device.

    All ranks have as many batches of the same size: what is missing at the end is taken from the
    beginning, unless the loader drops its last batch. ``remainder`` says how many samples of the
    last round are no repetition.

    Args:
        loader: what the script has built.
        world: the joined processes.
        split: batches are cut up among ranks instead of being dealt out whole.
        even: whether the last round is filled up.
        place: whether batches are moved to the device.
        enter: called with this loader when it is gone over, and at its end.
        dispatch: whether rank 0 reads, and sends the others their share; left out: of streams.
        seed: of each epoch's order, with the epoch added; ``None``: the sampler draws it.
        synchronized: generators that rank 0 gives the others when the loader is gone over.
        skipped: batches that are left out at the beginning.

    Attributes:
        end_of_dataloader: whether the batch that was given out last is the last one.
        remainder: samples of the last round that count; 0 if all do, -1 where it is not known.
        iteration: how often it was gone over.
        total_batch_size: samples of a batch over all ranks, of a stream that each rank reads those
            of one rank; ``None`` where that is not known.

    Raises:
        ConfigError: its batches cannot be cut up, or not be read on every rank.
    """

    def __init__(
        self,
        loader: DataLoader,
        world: World,
        *,
        split: bool,
        even: bool,
        place: bool,
        enter: Enter,
        dispatch: bool | None = None,
        seed: int | None = None,
        synchronized: Sequence[str] = ("generator",),
        skipped: int = 0,
    ) -> None:
        self.source = loader
        self._arguments: dict[str, Any] = {
            "split": split, "even": even, "place": place, "enter": enter, "dispatch": dispatch,
            "seed": seed, "synchronized": synchronized,
        }  # fmt: skip
        self._world, self._enter, self._place = world, enter, place
        self._synchronized = synchronized
        self.end_of_dataloader, self.remainder, self.iteration = False, -1, 0
        self.skipped, self.total_batch_size = skipped, None
        self._generator: torch.Generator | None = None
        self._drop_last, self._split = bool(loader.drop_last), split
        streamed = isinstance(loader.dataset, IterableDataset)
        size = loader.batch_size
        settings = settings_of(loader)
        # Accelerate 1.15, data_loader.py: on one rank, too, the script's generator is left to its
        # sampler, so that the seed of workers is of the global one, and batches are counted.
        self._counts = streamed if dispatch is None else dispatch
        if self._counts:
            del settings["generator"]
        self.dispatches = self._counts and world.data_size > 1
        if streamed:
            dataset: Any = loader.dataset
            if world.data_size > 1 and not self.dispatches and _has_shards(dataset, world, split):
                dataset = dataset.shard(num_shards=world.data_size, index=world.data_rank)
            elif world.data_size > 1 and not self.dispatches:
                each = size or 1
                dataset = ShardedStream(dataset, each, world, drop=loader.drop_last, split=split)
                size = each // world.data_size if split else each
            if not self._counts:
                # What Accelerate says of a stream, of which it knows one rank's batches.
                self.total_batch_size = size
            super().__init__(dataset, batch_size=size, drop_last=loader.drop_last, **settings)
            self._batches = self.batch_sampler
            return
        batches: Any = (
            loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
        )
        if batches is None:
            raise ConfigError(
                f"this DataLoader over {type(loader.dataset).__name__} has batch_size=None, so "
                "there are no batches to deal out. Give it a batch_size or a batch_sampler."
            )
        size = getattr(batches, "batch_size", None)
        if split and (size is None or size % world.data_size):
            raise ConfigError(
                f"split_batches cuts each batch into {world.data_size} equal parts, and this "
                f"DataLoader has batch_size {size}. Give it a multiple of the number of ranks."
            )
        sampler = None
        # Accelerate 1.15.0 gives what deals out batches the sampler that it seeds, and not the
        # batch sampler of the script's that is behind it, where the dataset is asked for batches.
        if seed is not None and batches is not loader.sampler:
            sampler = _seed(batches, seed)
        elif seed is None and not self.dispatches:
            self._generator = _own_generator(batches, world)
        self.total_batch_size = None if size is None else size * (1 if split else world.data_size)
        if world.data_size > 1 and not self.dispatches:
            batches = _Dealt(batches, world, split=split, even=even, sampler=sampler)
        if skipped:
            batches = _Skipping(batches, skipped)
        self._batches = batches
        if isinstance(loader.sampler, BatchSampler):
            # The dataset is asked for a whole batch.
            super().__init__(loader.dataset, sampler=batches, batch_size=None, **settings)
        else:
            super().__init__(loader.dataset, batch_sampler=batches, **settings)

    @property
    def even(self) -> bool:
        """Whether the last round is filled up."""
        return self._arguments["even"]

    @even.setter
    def even(self, even: bool) -> None:
        self._arguments["even"] = even
        if isinstance(self._batches, _Dealt):
            self._batches.even = even

    @property
    def total_dataset_length(self) -> int:
        """How many samples there are over all ranks; of a stream that each rank reads, over one."""
        return len(self.dataset)  # pyright: ignore[reportArgumentType]

    def without_first(self, num_batches: int) -> DealtLoader:
        """The loader without its first batches; this one is left as it is."""
        rest = DealtLoader(
            self.source, self._world, **self._arguments, skipped=self.skipped + num_batches
        )
        rest.iteration, rest._generator = self.iteration, self._generator
        return rest

    @property
    def uneven(self) -> bool:
        """Whether some ranks have a batch more than others."""
        dealt = self._batches
        return isinstance(dealt, _Dealt) and len(set(map(dealt.length, range(dealt.size)))) > 1

    def __len__(self) -> int:
        length = super().__len__()
        if not self.dispatches or self._split:
            return length
        rounds, rest = divmod(length, self._world.data_size)
        return rounds + bool(rest and not self._drop_last)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        share_generators(self._synchronized, self._generator, self._world)
        self.end_of_dataloader, self.remainder = False, -1
        # Nor is it known there (Accelerate 1.15.0, SkipBatchSampler) of one that skips batches.
        known = not (self._counts or self.skipped or self._drop_last)
        if known and self.total_batch_size:
            with contextlib.suppress(TypeError):
                self.remainder = len(self.dataset) % self.total_batch_size  # pyright: ignore
        self._enter(self, True)
        self.set_epoch(self.iteration)
        left_out = self.skipped if isinstance(self.dataset, IterableDataset) else 0
        batches: Any = super().__iter__()
        if self.dispatches:
            batches = self._dispatched(batches)
        following = enumerate(batches)
        now = next(following, None)
        while now is not None:
            # One batch ahead, for what follows the last batch is asked before it is used.
            index, batch = now
            if self._place:
                batch = move_to(batch, self._world.device)
            now = next(following, None)
            self.end_of_dataloader = now is None
            if self.end_of_dataloader and self._counts and not self.dispatches:
                self.remainder = _counted(batch)
            if index >= left_out:
                yield batch
        self.iteration += 1
        self._enter(self, False)

    def _dispatched(self, batches: Iterator[Any]) -> Iterator[Any]:
        for share, count in dispatched(
            batches, self._world, split=self._split, drop=self._drop_last
        ):
            self.remainder = count
            yield share

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler and the dataset which epoch comes next."""
        self.iteration = epoch
        batches: Any = self.batch_sampler
        inner = batches if self._counts else getattr(batches, "batch_sampler", None)
        sampler = getattr(inner, "sampler", None)
        # Whom Accelerate 1.15.0 tells (data_loader.py, set_epoch), also of one that skips batches,
        # behind which it does not look as far; others may count by themselves.
        told: list[Any] = [sampler if hasattr(sampler, "set_epoch") else self.dataset]
        if not self._counts:
            told = [batches, getattr(batches, "sampler", None), *told]
        for one in told:
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """The loader without the first batches; the original is left as it is."""
    if isinstance(dataloader, DealtLoader):
        return dataloader.without_first(num_batches)
    if isinstance(dataloader.dataset, IterableDataset):
        raise ConfigError(
            "skip_first_batches cannot skip in a stream that is not prepared. Call "
            "accelerator.prepare(loader) first."
        )
    return DataLoader(
        dataloader.dataset,
        batch_sampler=_Skipping(dataloader.batch_sampler, num_batches),
        **settings_of(dataloader),
    )


def share_generators(kinds: Sequence[str], generator: torch.Generator | None, world: World) -> None:
    """Give every rank the states of rank 0's generators. Collective.

    Args:
        kinds: ``torch``, ``cuda`` or ``generator``.
        generator: of the last kind.
        world: the joined processes.

    Raises:
        ConfigError: there is no such kind.
    """
    for kind in map(str, kinds):
        if kind == "generator":
            if generator is None:
                continue
            get, put = generator.get_state, generator.set_state
        elif kind == "torch":
            get, put = torch.get_rng_state, torch.set_rng_state
        elif kind == "cuda":
            get, put = torch.cuda.get_rng_state, torch.cuda.set_rng_state
        else:
            raise ConfigError(f"rng_types has {kind!r}. Choose of torch, cuda, generator.")
        put(world.broadcast(get() if world.is_main else None))


class SeedableRandomSampler(RandomSampler):
    """A random order that a seed and the number of the epoch make."""

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.initial_seed = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.epoch + self.initial_seed)
        yield from super().__iter__()
        self.epoch += 1

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next."""
        self.epoch = epoch


def _seed(batches: Any, seed: int) -> SeedableRandomSampler | None:
    """Put what a seed makes in the place of a sampler that shuffles; returns it."""
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, RandomSampler) and not isinstance(sampler, SeedableRandomSampler):
        # torch 2.13, utils/data/sampler.py: its property of that name is never None.
        batches.sampler = SeedableRandomSampler(
            sampler.data_source, replacement=sampler.replacement, num_samples=sampler._num_samples,
            generator=sampler.generator, data_seed=seed,
        )  # fmt: skip
    found = getattr(batches, "sampler", None)
    return found if isinstance(found, SeedableRandomSampler) else None


def _has_shards(dataset: Any, world: World, split: bool) -> bool:
    """Whether each rank can read shards of its own of a stream of Hugging Face's ``datasets``."""
    known = sys.modules.get("datasets")
    return (
        known is not None and isinstance(dataset, known.IterableDataset) and not split
        and dataset.n_shards >= world.data_size
    )  # fmt: skip


def _own_generator(batches: Any, world: World) -> torch.Generator | None:
    """The generator that shuffles, which all ranks are to have in the same state."""
    sampler: Any = getattr(batches, "sampler", None)
    if world.data_size == 1 or not hasattr(sampler, "generator"):
        return None
    if sampler.generator is None:
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_()))
    return sampler.generator


def _counted(batch: Any) -> int:
    """How many samples a batch has; -1 where it does not tell, as one that is not of tensors."""
    if holds_tensors_only(batch):
        with contextlib.suppress(IndexError, StopIteration):
            return length_of(batch)
    return -1


class _Skipping(Sampler[list[int]]):
    """The batches of a batch sampler without the first ones."""

    def __init__(self, batch_sampler: Any, skipped: int) -> None:
        self.batch_sampler, self._skipped = batch_sampler, skipped

    def __len__(self) -> int:
        return len(self.batch_sampler) - self._skipped

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.islice(iter(self.batch_sampler), self._skipped, None)


class _Dealt(Sampler[list[int]]):
    """This rank's batches of a batch sampler; whole ones where it names no batch size."""

    def __init__(
        self, batch_sampler: Any, world: World, *, split: bool, even: bool, sampler: Any
    ) -> None:
        self.batch_sampler, self._split, self.even = batch_sampler, split, even
        if sampler is not None:
            self.sampler = sampler
        self._rank, self.size = world.data_rank, world.data_size
        self.batch_size = getattr(batch_sampler, "batch_size", None)
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    def __len__(self) -> int:
        return self.length(self._rank)

    def length(self, rank: int) -> int:
        """How many batches a rank has."""
        if self._split:
            # A rank may have none of the last one, which only going over it shows.
            return len(self.batch_sampler)
        full, rest = divmod(len(self.batch_sampler), self.size)
        if not rest or self.drop_last:
            return full
        return full + 1 if self.even or rank < rest else full

    def __iter__(self) -> Iterator[list[int]]:
        if self.batch_size is None:
            yield from self._whole()
            return
        yield from self._cut_up(self.batch_size) if self._split else self._dealt(self.batch_size)

    # Batches of fewer samples than the others may come anywhere: which of them count is as in
    # Accelerate 1.15.0 (data_loader.py, BatchSamplerShard).

    def _cut_up(self, size: int) -> Iterator[list[int]]:
        """A part of each batch; of fewer samples the last one alone counts."""
        each = size // self.size
        own, first, last = slice(each * self._rank, each * (self._rank + 1)), [], []
        for last in self.batch_sampler:
            first = first or list(last)
            if len(last) == size:
                yield last[own]
        if not first or self.drop_last or len(last) == size:
            return
        if self.even:
            last = [*last, *itertools.islice(itertools.cycle(first), size)]
        if part := last[own]:
            yield part

    def _dealt(self, size: int) -> Iterator[list[int]]:
        """One batch of each round; a round whose last one has fewer samples is left out."""
        first: list[int] = []
        last, own, number = [], [], 0
        for number, last in enumerate(self.batch_sampler, start=1):
            first += last if number <= self.size else []
            place = (number - 1) % self.size
            own = last if place == self._rank else own
            if place == self.size - 1 and len(last) == size:
                yield own
                own = []
        if not first or self.drop_last:
            return
        if not self.even:
            if own:
                yield own
            return
        if len(own) == size:
            yield own
        # Of the last round what is missing is filled up, of a batch or of whole ones.
        place, more = (number - 1) % self.size, itertools.cycle(first)
        if len(last) == size:
            place, last = place + 1, []
        while place < self.size:
            last = [*last, *itertools.islice(more, max(0, size - len(last)))]
            if place == self._rank:
                yield last
            place, last = place + 1, []

    def _whole(self) -> Iterator[list[int]]:
        batches, first = iter(self.batch_sampler), []
        while now := list(itertools.islice(batches, self.size)):
            first = first or now
            if len(now) < self.size and self.drop_last:
                return
            if self.even:
                now += itertools.islice(itertools.cycle(first), self.size - len(now))
            if self._rank < len(now):
                yield now[self._rank]


__getattr__ = Table("accelerate.data_loader").refusing(__name__)
