"""This rank's share of each global batch."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from unipar.data.batch import Batch, MicroBatch
from unipar.data.checks import (
    check_same_epoch,
    check_size,
    no_batch,
    saved_position,
    shuffles,
    slicing_of,
)
from unipar.data.columns import Columns, columns_of
from unipar.data.feed import copies_to, fed
from unipar.data.order import Position, Slicing, Wanted, WantedSampler, epoch_order, mixed_seed
from unipar.data.randomness import OwnRandomness
from unipar.data.samples import (
    Collate,
    Samples,
    as_it_is,
    raise_different,
    same_structure,
    structure,
)
from unipar.data.sources import open_source
from unipar.data.stream import StreamShare
from unipar.data.workers import items_of, loading_settings
from unipar.errors import CheckpointError, DataError

log = logging.getLogger("unipar.data")


class Loader:
    """Iterates over the rest of the current epoch, then stands at the start of the next.

    Args:
        data: a map-style dataset, ``IterableDataset``, ``DataLoader``, tensor (samples along its
            first dim), tuple of tensors (columns), or list of samples.
        global_batch_size: samples of one step over all ranks.
        micro_batch_size: samples of one forward pass on the rank with the largest share, to which
            others' are in proportion; left out: the rank's whole share.
        data_rank: which share of a global batch this is.
        data_size: number of shares.
        shares: positive numbers that shares are in proportion to; left out: equal shares.
        seed: of the order.
        shuffle: whether each epoch has an order of its own; left out: as a ``DataLoader`` says, or
            else yes. A stream has the order in which it comes.
        num_workers: processes that load samples; left out: as a ``DataLoader`` says, or else none.
        collate_fn: makes a batch of a list of samples.
        pin_memory: whether batches go to page-locked memory.

    Raises:
        DataError: the data is empty, or smaller than a global batch.
        ConfigError: the batch sizes contradict each other, or the shares.
    """

    def __init__(
        self,
        data: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        data_rank: int = 0,
        data_size: int = 1,
        shares: Sequence[float] | None = None,
        seed: int = 0,
        shuffle: bool | None = None,
        num_workers: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool | None = None,
    ) -> None:
        source = open_source(data)
        self._source = source
        self._slicing = slicing_of(
            global_batch_size, micro_batch_size, data_rank, data_size, shares
        )
        self._seed = seed
        self._shuffle = shuffles(shuffle, source)
        self._settings = loading_settings(source, num_workers, pin_memory)
        self._collate = Collate(collate_fn or source.collate_fn)
        self._in_memory = source.in_memory and collate_fn is None
        self._position = Position(0, 0)
        self._stream_state: Any = None
        self._structure: Any = None
        self._dataset_loader: DataLoader | None = None
        if source.num_samples is not None:
            check_size(source.num_samples, global_batch_size, source)
        if isinstance(data, DataLoader) and data_rank == 0:
            # One with a generator was meant to be shuffled by that.
            log.log(
                logging.WARNING if data.generator is not None and self._shuffle else logging.INFO,
                "a DataLoader was given: its dataset, collate function and workers are kept; "
                "unipar decides the order, by seed, and the batches, neither of which may depend "
                "on the devices",
            )

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
        return self.num_microbatches(self.global_batch_size)

    @property
    def share_sizes(self) -> list[int]:
        """Samples of a full global batch that each data-parallel rank takes."""
        return self.shares_of(self.global_batch_size)

    @property
    def last_batch_size(self) -> int | None:
        """Samples of an epoch's last global batch, if that is not full; ``None``: not known."""
        if self.num_samples is None or self._source.drop_last:
            return None
        return self.num_samples % self.global_batch_size or None

    def shares_of(self, size: int) -> list[int]:
        """Samples of a global batch of some size that each data-parallel rank takes."""
        ranks = range(self._slicing.data_size)
        cuts = [dataclasses.replace(self._slicing, data_rank=rank).share(size) for rank in ranks]
        return [end - start for start, end in cuts]

    def num_microbatches(self, size: int) -> int:
        """Micro-batches of a global batch of some size."""
        return self._slicing.num_microbatches(size)

    @property
    def is_stream(self) -> bool:
        """Whether the data comes in an order of its own, from its beginning on."""
        return self._source.is_stream

    @property
    def num_samples(self) -> int | None:
        """Samples of an epoch over all ranks; ``None`` for a stream that does not know."""
        return self._source.num_samples

    @property
    def num_batches(self) -> int | None:
        """Global batches of an epoch; ``None`` for a stream that does not know."""
        if self.num_samples is None:
            return None
        batches = self.num_samples / self.global_batch_size
        return math.floor(batches) if self._source.drop_last else math.ceil(batches)

    @property
    def order(self) -> dict[str, Any]:
        """All that decides which samples a step sees, in JSON types; the same on every rank."""
        return {
            "num_samples": self.num_samples,
            "global_batch_size": self.global_batch_size,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "drop_last": self._source.drop_last,
        }

    def with_micro_batch_size(self, micro_batch_size: int) -> Loader:
        """The same loader at the same position, with other micro-batches."""
        old = self._slicing
        return self._cut_by(
            slicing_of(
                old.global_batch_size, micro_batch_size, old.data_rank, old.data_size, old.shares
            )
        )

    def with_shares(self, shares: Sequence[float]) -> Loader:
        """The same loader at the same position, with other shares of each global batch."""
        old = self._slicing
        sizes = old.global_batch_size, old.micro_batch_size, old.data_rank, old.data_size
        return self._cut_by(slicing_of(*sizes, shares))

    def _cut_by(self, slicing: Slicing) -> Loader:
        other = copy.copy(self)
        other._slicing = slicing
        other._structure = other._dataset_loader = None
        return other

    # -- where it stands -------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """The batch that comes next."""
        return self._position

    def peek(self) -> Batch:
        """The next batch, the position staying where it is.

        Raises:
            DataError: the data is a stream that cannot be read from its beginning twice.
        """
        position, stream_state = self._position, self._stream_state
        dataset = self._source.dataset
        if self.is_stream and iter(dataset) is iter(dataset):
            raise DataError(
                f"the stream ({type(dataset).__name__}) gives the same iterator each time, so the "
                "samples that 'auto' tries would be missing in training. Let its __iter__ begin "
                "again each time it is called, or give micro_batch_size and shares as numbers."
            )
        keeps_place = hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")
        place = copy.deepcopy(dataset.state_dict()) if keeps_place else None
        try:
            return next(iter(self))
        finally:
            self._position, self._stream_state = position, stream_state
            if place is not None:
                dataset.load_state_dict(place)

    def first(self, num_samples: int) -> MicroBatch:
        """The first samples of the epoch, the same on every rank, the position staying where it is.

        Args:
            num_samples: at most those of a global batch.
        """
        alone = self._cut_by(Slicing(num_samples, num_samples, data_rank=0, data_size=1))
        alone._position, alone._stream_state = Position(self._position.epoch, 0), None
        return alone.peek().microbatches[0]

    def rewind(self) -> None:
        """Go back to the first batch of the first epoch."""
        self._position, self._stream_state = Position(0, 0), None

    def state_dict(self) -> dict[str, Any]:
        """The position, in JSON types, with the stream's own state where it has one.

        Raises:
            DataError: the stream's own state is of other types.
        """
        try:
            json.dumps(self._stream_state)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"state_dict() of {type(self._source.dataset).__name__} cannot be saved as JSON: "
                f"{error}. Return numbers, strings, lists and dicts only (tensor.tolist())."
            ) from error
        return {
            **dataclasses.asdict(self._position),
            "stream": self._stream_state,
            **self.order,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position that :meth:`state_dict` told, on any number of ranks.

        Raises:
            CheckpointError: it is no position, or one behind the end of the epoch.
            DataError: it lies within an epoch over a different number of samples.
            ConfigError: it lies within an epoch with another seed, shuffling or global batch size.
        """
        position = saved_position(state)
        if position.index:
            check_same_epoch(state, self.order)
        # One beyond the last is where a ragged batch was to come that is left out now.
        if self.num_batches is not None and position.index > self.num_batches:
            raise CheckpointError(
                f"the saved position is batch {position.index} of an epoch of {self.num_batches}."
            )
        self._position, self._stream_state = position, state.get("stream")

    # -- batches ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Batch]:
        return self._used(self._reading())

    def feed(self, device: torch.device, *, limit: int | None = None) -> Iterator[Batch]:
        """The rest of the epoch, as by iterating, its micro-batches copied one ahead to a GPU.

        Where loading runs no code of the user's in this process (``num_workers``, or samples that
        are tensors or in a list), each batch but the first of an epoch is read before the one that
        it follows is used; elsewhere when it is due, as without a feed. The position counts batches
        that were used, and errors come with the batch that they belong to. On a CPU this is
        iterating.

        Args:
            device: where micro-batches are used, by :func:`unipar.data.on_device`.
            limit: how many batches will be used: none is read ahead beyond them.
        """
        begin = copies_to(device)
        if begin is None:
            return iter(self)
        ahead = bool(self._settings.get("num_workers")) or self._in_memory
        reading = fed(self._reading(), device, begin, ahead=ahead, limit=limit)
        return self._used(reading)

    def _reading(self) -> Generator[tuple[Batch, Any], None, None]:
        return self._streamed() if self._source.is_stream else self._indexed()

    def _used(self, reading: Generator[tuple[Batch, Any], None, None]) -> Iterator[Batch]:
        """Keeps the position behind the batch that was used last."""
        epoch, start = self._position.epoch, self._position.index
        index, num_batches = start - 1, self.num_batches
        with contextlib.closing(reading) as batches:
            for index, (batch, state) in enumerate(batches, start):
                self._check(batch)
                last = index + 1 == num_batches
                self._position = Position(epoch + 1, 0) if last else Position(epoch, index + 1)
                self._stream_state = None if last else state
                yield batch
        if index < start and self._source.is_stream and start == 0:
            raise DataError(no_batch(self._source, epoch, self.global_batch_size))
        self._position, self._stream_state = Position(epoch + 1, 0), None

    def _indexed(self) -> Generator[tuple[Batch, None], None, None]:
        """Batches of a map-style dataset from the position on."""
        epoch, start = self._position.epoch, self._position.index
        assert self.num_samples is not None
        assert self.num_batches is not None
        order = epoch_order(self.num_samples, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
        wanted = Wanted(order, self._slicing, range(start, self.num_batches), epoch)
        with items_of(self._loader_of(wanted)) as samples:
            for index in range(start, self.num_batches):
                num_samples, cuts = wanted.cuts(index)
                parts = tuple(MicroBatch(self._next(samples).data, b - a, a) for a, b in cuts)
                yield Batch(parts, num_samples, index, epoch), None

    def _loader_of(self, wanted: Wanted) -> DataLoader:
        if self._dataset_loader is None:
            collate = self._collate
            dataset = Samples(self._source.dataset, self._slicing.data_rank, self._seed)
            if (columns := self._columns()) is not None:
                dataset, collate = columns, as_it_is
            self._dataset_loader = DataLoader(
                dataset,
                batch_sampler=WantedSampler(wanted),
                collate_fn=collate,
                generator=torch.Generator(),
                **self._settings,
            )
        self._seed_workers(self._dataset_loader)
        # The loader is kept so that its workers can be; only what it is asked for changes.
        sampler = self._dataset_loader.batch_sampler
        assert isinstance(sampler, WantedSampler)
        sampler.wanted = wanted
        return self._dataset_loader

    def _columns(self) -> Columns | None:
        """The data as columns; in a worker, samples are copied into the memory that it shares."""
        if not self._in_memory or self._settings.get("num_workers"):
            return None
        return columns_of(self._source.dataset)

    def _streamed(self) -> Generator[tuple[Batch, Any], None, None]:
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
            # After skipping, the stream's random numbers are those that it had; with a state of
            # its own it skips nothing, and they must not be those of the epoch's beginning.
            seed=mixed_seed(self._seed, epoch, 0 if self._stream_state is None else start),
        )
        loader = DataLoader(share, batch_size=None, generator=torch.Generator(), **self._settings)
        self._seed_workers(loader)
        with items_of(loader) as items:
            for index in range(start, 2**63):
                try:
                    parts, num_samples, state = self._next(items)
                except StopIteration:
                    return
                cuts = self._slicing.microbatches(num_samples)
                batch = tuple(
                    MicroBatch(collated.data, count, first)
                    for (collated, count), (first, _) in zip(parts, cuts, strict=True)
                )
                yield Batch(batch, num_samples, index, epoch), state

    def _seed_workers(self, loader: DataLoader) -> None:
        """What a collate function or a stream draws differs between epochs, ranks and workers.

        The loader has a generator of its own, or it would draw from the one that dropout uses, and
        a resumed run would go on differently.
        """
        epoch, index = self._position.epoch, self._position.index
        assert loader.generator is not None
        seed = mixed_seed(self._seed, epoch, index, self._slicing.data_rank)
        loader.generator.manual_seed(seed)
        if not self._settings.get("num_workers") and self._collate.is_own:
            # There is no process whose numbers a loader would seed, and dropout has this one's.
            self._collate.draws = OwnRandomness(seed)

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
            if "DataLoader timed out" in str(error):
                raise DataError(
                    f"rank {self._slicing.data_rank}: no batch came within the DataLoader's "
                    f"timeout of {self._settings['timeout']} s. Raise timeout, or num_workers, or "
                    "find what holds the dataset up."
                ) from error
            if "DataLoader worker" not in str(error):
                raise
            raise DataError(
                f"a data-loading process of rank {self._slicing.data_rank} ended unexpectedly: "
                f"{error}. If it ran out of memory, lower num_workers; num_workers=0 loads in the "
                "training process, where errors show as they are."
            ) from error

    def _check(self, batch: Batch) -> None:
        for microbatch in batch:
            found, size = structure(microbatch.data), max(microbatch.num_samples, 1)
            if self._structure is None:
                self._structure = found, size
            elif found != self._structure[0]:
                expected, expected_size = self._structure
                if not same_structure(expected, expected_size, found, size):
                    raise_different(expected, found, batch)
