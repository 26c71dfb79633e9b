"""This rank's share of each global batch."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from unipar.batch import Batch, MicroBatch
from unipar.data.order import Position, Slicing, epoch_order
from unipar.data.samples import Collate, Samples, raise_different, structure
from unipar.data.sources import Source, open_source
from unipar.data.stream import StreamShare
from unipar.errors import ConfigError, DataError


class Loader:
    """Iterates over the rest of the current epoch, then stands at the start of the next.

    Args:
        data: a map-style dataset, ``IterableDataset``, ``DataLoader``, tensor (samples along its
            first dim), tuple of tensors (columns), or list of samples.
        global_batch_size: samples of one step over all ranks.
        micro_batch_size: samples of one forward pass on one rank; left out: the rank's whole share.
        data_rank: which share of a global batch this is.
        data_size: number of shares.
        seed: of the order.
        shuffle: whether each epoch has an order of its own; left out: as a ``DataLoader`` says, or
            else yes. A stream has the order in which it comes.
        num_workers: processes that load samples; left out: as a ``DataLoader`` says, or else none.
        collate_fn: makes a batch of a list of samples.
        pin_memory: whether batches go to page-locked memory.

    Raises:
        DataError: the data is empty, or smaller than a global batch.
        ConfigError: the batch sizes contradict each other.
    """

    def __init__(
        self,
        data: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        data_rank: int = 0,
        data_size: int = 1,
        seed: int = 0,
        shuffle: bool | None = None,
        num_workers: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
    ) -> None:
        source = open_source(data)
        self._source = source
        self._slicing = _slicing(global_batch_size, micro_batch_size, data_rank, data_size)
        self._seed = seed
        self._shuffle = _shuffle(shuffle, source)
        self._settings = _settings(source, num_workers, pin_memory)
        self._collate = Collate(collate_fn or source.collate_fn)
        self._position = Position(0, 0)
        self._stream_state: Any = None
        self._structure: Any = None
        self._dataset_loader: DataLoader | None = None
        if self.num_samples is not None:
            _check_size(self.num_samples, global_batch_size, source)

    # -- what it is ------------------------------------------------------------------------------

    @property
    def global_batch_size(self) -> int:
        return self._slicing.global_batch_size

    @property
    def micro_batch_size(self) -> int:
        return self._slicing.micro_batch_size

    @property
    def accumulation(self) -> int:
        """Micro-batches of a full global batch."""
        return self._slicing.num_microbatches(self.global_batch_size)

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch over all ranks; ``None`` for a stream that does not know."""
        dataset = self._source.dataset
        return len(dataset) if hasattr(dataset, "__len__") else None

    @property
    def num_batches(self) -> int | None:
        """Global batches of an epoch; ``None`` for a stream that does not know."""
        if self.num_samples is None:
            return None
        batches = self.num_samples / self.global_batch_size
        return math.floor(batches) if self._source.drop_last else math.ceil(batches)

    def with_micro_batch_size(self, micro_batch_size: int) -> Loader:
        """The same loader at the same position, with other micro-batches."""
        other = copy.copy(self)
        old = self._slicing
        other._slicing = _slicing(
            old.global_batch_size, micro_batch_size, old.data_rank, old.data_size
        )
        other._structure = other._dataset_loader = None
        return other

    # -- where it stands -------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """The batch that comes next."""
        return self._position

    def peek(self) -> Batch:
        """The next batch, the position staying where it is."""
        position, stream_state = self._position, self._stream_state
        dataset = self._source.dataset
        keeps_place = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        place = copy.deepcopy(dataset.state_dict()) if keeps_place else None
        try:
            return next(iter(self))
        finally:
            self._position, self._stream_state = position, stream_state
            if place is not None:
                dataset.load_state_dict(place)

    def rewind(self) -> None:
        """Go back to the first batch of the first epoch."""
        self._position, self._stream_state = Position(0, 0), None

    def state_dict(self) -> dict[str, Any]:
        """The position, in JSON types, with the stream's own state where it has one."""
        return {**dataclasses.asdict(self._position), "stream": self._stream_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that :meth:`state_dict` told, on any number of ranks."""
        self._position = Position(int(state["epoch"]), int(state["index"]))
        self._stream_state = state.get("stream")

    # -- batches ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        epoch, start = self._position.epoch, self._position.index
        batches = self._streamed() if self._source.is_stream else self._indexed()
        index = start - 1
        for index, (batch, state) in enumerate(batches, start):
            last = index + 1 == self.num_batches
            self._position = Position(epoch + 1, 0) if last else Position(epoch, index + 1)
            self._stream_state = None if last else state
            self._check(batch)
            yield batch
        if index < start and self._source.is_stream and start == 0:
            raise DataError(_no_batch(self._source, epoch, self.global_batch_size))
        self._position, self._stream_state = Position(epoch + 1, 0), None

    def _indexed(self) -> Iterator[tuple[Batch, None]]:
        """Batches of a map-style dataset from the position on."""
        epoch, start = self._position.epoch, self._position.index
        assert self.num_samples is not None
        assert self.num_batches is not None
        order = epoch_order(
            self.num_samples, seed=self._seed, epoch=epoch, shuffle=self._shuffle
        ).tolist()
        size = self.global_batch_size
        plan: list[tuple[int, list[tuple[int, int]]]] = []
        wanted: list[list[int]] = []
        for index in range(start, self.num_batches):
            block = order[index * size : (index + 1) * size]
            cuts = self._slicing.microbatches(len(block))
            plan.append((len(block), cuts))
            # An empty micro-batch is run all the same, on a sample that counts nothing.
            wanted.extend(block[a:b] or block[:1] for a, b in cuts)
        samples = iter(self._loader_of(wanted))
        for index, (num_samples, cuts) in enumerate(plan, start):
            parts = tuple(MicroBatch(self._next(samples), b - a) for a, b in cuts)
            yield Batch(parts, num_samples, index, epoch), None

    def _loader_of(self, wanted: list[list[int]]) -> DataLoader:
        if self._dataset_loader is None:
            self._dataset_loader = DataLoader(
                Samples(self._source.dataset, self._slicing.data_rank),
                batch_sampler=_Wanted(),
                collate_fn=self._collate,
                generator=torch.Generator(),
                **self._settings,
            )
        self._seed_workers(self._dataset_loader)
        # The loader is kept so that its workers can be; only what it is asked for changes.
        sampler = self._dataset_loader.batch_sampler
        assert isinstance(sampler, _Wanted)
        sampler.indices = wanted
        return self._dataset_loader

    def _streamed(self) -> Iterator[tuple[Batch, Any]]:
        """Batches of a stream from the position on."""
        epoch, start = self._position.epoch, self._position.index
        dataset = self._source.dataset
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        share = StreamShare(
            dataset,
            self._slicing,
            self._collate,
            start=start,
            state=self._stream_state,
            drop_last=self._source.drop_last,
        )
        loader = DataLoader(share, batch_size=None, generator=torch.Generator(), **self._settings)
        self._seed_workers(loader)
        items = iter(loader)
        for index in range(start, 2**63):
            try:
                parts, num_samples, state = self._next(items)
            except StopIteration:
                return
            batch = tuple(MicroBatch(data, count) for data, count in parts)
            yield Batch(batch, num_samples, index, epoch), state

    def _seed_workers(self, loader: DataLoader) -> None:
        """Random augmentations differ between epochs, ranks and workers.

        The loader has a generator of its own, or it would draw from the one that dropout uses, and
        a resumed run would go on differently.
        """
        epoch, index = self._position.epoch, self._position.index
        seed = hash((self._seed, epoch, index, self._slicing.data_rank))
        assert loader.generator is not None
        loader.generator.manual_seed(seed % 2**63)

    def _next(self, items: Iterator[Any]) -> Any:
        try:
            return next(items)
        except DataError as error:
            # A worker process sends the traceback as text; the message stands at its end.
            _, raised, message = str(error).rpartition(f"{DataError.__module__}.DataError: ")
            if not raised:
                raise
            raise DataError(message.strip()) from error
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise DataError(
                f"a data-loading process of rank {self._slicing.data_rank} ended unexpectedly: "
                f"{error}. If it ran out of memory, lower num_workers; num_workers=0 loads in the "
                "training process, where errors show as they are."
            ) from error

    def _check(self, batch: Batch) -> None:
        for microbatch in batch:
            found = structure(microbatch.data)
            if self._structure is None:
                self._structure = found
            elif found != self._structure:
                raise_different(self._structure, found, batch)


_OF_WORKERS = ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


class _Wanted:
    """A batch sampler that says what it is told to say."""

    indices: list[list[int]]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def _no_batch(source: Source, epoch: int, global_batch_size: int) -> str:
    name = type(source.dataset).__name__
    if epoch:
        return (
            f"the stream ({name}) gave no sample in epoch {epoch}: it was used up before. Its "
            "__iter__ must begin anew each time it is called."
        )
    if source.drop_last:
        return (
            f"the stream ({name}) gave no full global batch of {global_batch_size}, and the "
            "DataLoader has drop_last=True. Lower global_batch_size, or leave drop_last out."
        )
    return f"the stream ({name}) is empty: iterating it gave no sample at all."


def _slicing(size: int, micro: int | None, rank: int, ranks: int) -> Slicing:
    if size < 1:
        raise ConfigError(f"global_batch_size={size}: ask for at least 1 sample a step.")
    share = math.ceil(size / ranks)
    if micro is None:
        micro = share
    if not 1 <= micro <= share:
        raise ConfigError(
            f"micro_batch_size={micro} does not fit: a global batch of {size} over {ranks} "
            f"device(s) leaves each {share}. Use 1 to {share}, or a larger global_batch_size."
        )
    return Slicing(size, micro, rank, ranks)


def _shuffle(shuffle: bool | None, source: Source) -> bool:
    if source.is_stream:
        if shuffle:
            raise ConfigError(
                "shuffle=True needs a dataset with indices, and this is a stream, which has the "
                "order in which it comes. Shuffle inside the stream (a buffer), and leave it out."
            )
        return False
    if shuffle is not None:
        return shuffle
    return True if source.shuffle is None else source.shuffle


def _settings(source: Source, num_workers: int | None, pin_memory: bool | None) -> dict[str, Any]:
    settings = dict(source.settings)
    if num_workers is not None:
        settings["num_workers"] = num_workers
        if num_workers == 0:
            for name in _OF_WORKERS:
                settings.pop(name, None)
    if pin_memory is not None:
        settings["pin_memory"] = pin_memory
    settings["pin_memory"] = bool(settings.get("pin_memory")) and torch.cuda.is_available()
    return settings


def _check_size(num_samples: int, global_batch_size: int, source: Source) -> None:
    if num_samples == 0:
        raise DataError(
            f"the data ({type(source.dataset).__name__}) is empty: it has 0 samples. "
            "Look at the path or filter that it was made with."
        )
    if num_samples < global_batch_size:
        hint = ""
        if isinstance(source.dataset, list) and all(
            isinstance(item, torch.Tensor) for item in source.dataset
        ):
            hint = " A list holds samples: for columns such as inputs and targets, pass a tuple."
        raise DataError(
            f"the data has {num_samples} samples, fewer than one global batch of "
            f"{global_batch_size}. Lower global_batch_size to at most {num_samples}.{hint}"
        )
