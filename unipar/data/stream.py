"""A rank's share of a stream."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from unipar.data.order import Slicing
from unipar.data.randomness import OwnRandomness
from unipar.data.samples import Pinnable
from unipar.errors import DataError

StreamBatch = tuple[list[tuple[Pinnable, int]], int, Any]
"""Micro-batches with their sample counts, samples of the global batch, the stream's state."""


class StreamShare(IterableDataset):
    """Reads the whole stream and keeps this rank's slice of every global batch.

    So nothing is trained on twice or left out, every rank sees the stream end at the same step
    without asking the others, and the order does not depend on their number. Of several worker
    processes, each makes every so-manyth batch.

    All of them must read the same stream, though many a stream shuffles with Python's, NumPy's or
    torch's own generator. So it is read under generators of its own, seeded alike everywhere. (A
    generator seeded by the operating system's entropy is beyond this.)

    Args:
        dataset: the stream, the same on every rank.
        slicing: this rank's slice.
        collate: makes a batch of a list of samples.
        start: batches to skip.
        state: the stream's own state at ``start``, which is then restored instead of skipping.
        drop_last: whether to leave out a ragged last global batch.
        seed: of the generators under which the stream is read; the same on every rank.
    """

    def __init__(
        self,
        dataset: Any,
        slicing: Slicing,
        collate: Callable[[list[Any]], Pinnable],
        *,
        start: int,
        state: Any,
        drop_last: bool,
        seed: int,
    ) -> None:
        self._dataset, self._slicing, self._collate = dataset, slicing, collate
        self._seed = seed
        self._start, self._state, self._drop_last = start, state, drop_last

    @property
    def dataset(self) -> _Undivided:
        """What stands for the stream in ``worker_init_fn``."""
        return _Undivided()

    def __iter__(self) -> Iterator[StreamBatch]:
        worker = get_worker_info()
        every, first = (worker.num_workers, worker.id) if worker else (1, 0)
        # A stream that divides itself among worker processes (Hugging Face's do) would lose samples
        # here, where each worker reads all of it. torch 2.13 has no public way to hide them
        # (utils/data/_utils/worker.py).
        torch_worker._worker_info = None
        size = self._slicing.global_batch_size
        begin = 0
        if self._state is not None and hasattr(self._dataset, "load_state_dict"):
            self._restore()
            begin = self._start
        samples, randomness = self._samples(begin * size), OwnRandomness(self._seed)
        for number in itertools.count(begin):
            # What is skipped is read batch by batch too, to draw the same random numbers.
            with randomness:
                block = list(itertools.islice(samples, size))
            if not block or (self._drop_last and len(block) < size):
                return
            if number >= self._start and (number - self._start) % every == first:
                yield self._cut(block), len(block), self._position(worker is None)

    def _restore(self) -> None:
        try:
            self._dataset.load_state_dict(self._state)
        except Exception as error:
            raise DataError(
                f"rank {self._slicing.data_rank}: {type(self._dataset).__name__} does not take its "
                f"saved state: load_state_dict() raised {type(error).__name__}: {error}. Give the "
                "data that it was saved with."
            ) from error

    def _samples(self, first: int) -> Iterator[Any]:
        stream = iter(self._dataset)
        for number in itertools.count(first):
            try:
                sample = next(stream)
            except StopIteration:
                return
            except Exception as error:
                raise DataError(
                    f"rank {self._slicing.data_rank}: sample {number} of "
                    f"{type(self._dataset).__name__} raised {type(error).__name__}: {error}. "
                    "Mend or leave out that sample."
                ) from error
            yield sample

    def _cut(self, block: list[Any]) -> list[tuple[Pinnable, int]]:
        # An empty micro-batch is run all the same, on a sample that counts nothing.
        return [
            (self._collate(block[a:b] or block[:1]), b - a)
            for a, b in self._slicing.microbatches(len(block))
        ]

    def _position(self, in_this_process: bool) -> Any:
        # A worker process would tell the state of its copy, which has read ahead.
        if in_this_process and hasattr(self._dataset, "state_dict"):
            return copy.deepcopy(self._dataset.state_dict())
        return None


class _Undivided:
    """In place of a stream in its workers, to each of which a function would give a part."""

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse(name)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        raise DataError(
            f"worker_init_fn uses get_worker_info().dataset.{name}, of a stream. Each worker reads "
            "all of it, and makes every so-manyth batch, so that nothing depends on their number. "
            "Leave out what divides the stream among workers, and set up the dataset in its "
            "__iter__."
        )
