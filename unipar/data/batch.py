"""One rank's share of a global batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The data of one forward pass.

    Attributes:
        data: the collated samples, on the host.
        num_samples: how many of them count. Zero marks padding: ``data`` then holds samples that
            another rank trains on, so that every rank runs the same number of forward passes
            (collectives would hang otherwise), and their loss must be given no weight.
        first: place of the first of them in the global batch, from 0, the others following it;
            ``None``: not known.
        copy: of ``data``, on its way to a device (:mod:`unipar.data.feed`), or ``None``.
    """

    data: Any
    num_samples: int
    first: int | None = None
    copy: Any = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's micro-batches of one global batch. Every rank holds equally many.

    Attributes:
        microbatches: at least one.
        global_num_samples: samples in the global batch, over all ranks.
        index: position of the global batch within its epoch, from 0.
        epoch: the epoch, from 0.
    """

    microbatches: tuple[MicroBatch, ...]
    global_num_samples: int
    index: int = 0
    epoch: int = 0

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.microbatches)

    def __len__(self) -> int:
        return len(self.microbatches)
