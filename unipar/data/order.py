"""The global order of samples, and each rank's share of it.

The order is a function of (seed, epoch) alone, and global batch ``i`` is samples ``i * B`` to
``(i + 1) * B`` of it, the last one being shorter. How many ranks there are only decides how a
global batch is cut up.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Position:
    """The next global batch: its epoch, and its index in it, both from 0."""

    epoch: int
    index: int


def mixed_seed(*parts: int | str) -> int:
    """A seed that each combination of ``parts`` has for itself, the same on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 2**63


def epoch_order(num_samples: int, *, seed: int, epoch: int, shuffle: bool) -> torch.Tensor:
    """Indices of all samples in the order in which this epoch sees them, int64."""
    if not shuffle:
        return torch.arange(num_samples, device="cpu")
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(num_samples, generator=generator, device="cpu")


# Asked for in each step, of full batches and of a ragged one.
@functools.lru_cache(maxsize=8)
def apportioned(num_samples: int, shares: tuple[int, ...]) -> tuple[int, ...]:
    """Divide samples in proportion to ``shares``, by largest remainder.

    Each part is its exact size rounded down, or up where what that leaves out is largest; of parts
    that leave out equally much, the first ones are rounded up. A batch with more samples never
    makes the part of the largest share smaller, so a ragged batch needs no more micro-batches than
    a full one.
    """
    whole = sum(shares)
    parts = [num_samples * share // whole for share in shares]
    left_out = [-(num_samples * share % whole) for share in shares]
    up = sorted(range(len(shares)), key=left_out.__getitem__)[: num_samples - sum(parts)]
    for number in up:
        parts[number] += 1
    return tuple(parts)


@dataclass(frozen=True)
class Slicing:
    """How a global batch is cut into ranks' shares and micro-batches.

    Attributes:
        global_batch_size: samples of a full global batch.
        micro_batch_size: samples of a forward pass on one rank, at most.
        data_rank: which share this is.
        data_size: number of shares.
        shares: what ranks take of a global batch in proportion to; ``None``: equal parts.
    """

    global_batch_size: int
    micro_batch_size: int
    data_rank: int
    data_size: int
    shares: tuple[int, ...] | None = None

    def share(self, num_samples: int) -> tuple[int, int]:
        """Where this rank's share of a global batch of ``num_samples`` starts and ends.

        Shares are contiguous, and where they are to be equal differ by one sample at most.
        """
        if self.shares is not None:
            parts = apportioned(num_samples, self.shares)
            start = sum(parts[: self.data_rank])
            return start, start + parts[self.data_rank]
        start = self.data_rank * num_samples // self.data_size
        return start, (self.data_rank + 1) * num_samples // self.data_size

    def largest_share(self, num_samples: int) -> int:
        """The most samples that a rank has of a global batch of ``num_samples``."""
        if self.shares is not None:
            return max(apportioned(num_samples, self.shares))
        return math.ceil(num_samples / self.data_size)

    def num_microbatches(self, num_samples: int) -> int:
        """Micro-batches of a global batch of ``num_samples``, the same on every rank."""
        return math.ceil(self.largest_share(num_samples) / self.micro_batch_size)

    def microbatches(self, num_samples: int) -> list[tuple[int, int]]:
        """Start and end of this rank's micro-batches in a global batch of ``num_samples``.

        Each share is cut into as many parts as the largest one needs, since ranks may wait for each
        other in every micro-batch; those of a share differ by one sample at most, so that none is
        left with a sample alone, of which BatchNorm learns nothing, where it can be helped. Of a
        share that has fewer samples than there are micro-batches the last ones are empty.
        """
        start, end = self.share(num_samples)
        number = self.num_microbatches(num_samples)
        # Rounded up, so that no micro-batch of a rank is larger than its first.
        cuts = [start - (start - end) * cut // number for cut in range(number + 1)]
        return list(itertools.pairwise(cuts))


class Indices(list[int]):
    """Of the samples of a micro-batch, on their way to a worker.

    Attributes:
        epoch: in which they are asked for.
    """

    epoch: int = 0


@dataclass(frozen=True)
class Wanted:
    """The samples of this rank's micro-batches, worked out as they are asked for."""

    order: torch.Tensor
    slicing: Slicing
    batches: range
    epoch: int = 0

    def cuts(self, index: int) -> tuple[int, list[tuple[int, int]]]:
        """Samples of a global batch, and where this rank's micro-batches lie in it."""
        size = self.slicing.global_batch_size
        num_samples = min(size, self.order.numel() - index * size)
        full = num_samples == size
        return num_samples, self._full if full else self.slicing.microbatches(num_samples)

    @functools.cached_property
    def _full(self) -> list[tuple[int, int]]:
        # Of all batches but the last, and asked for twice of each.
        return self.slicing.microbatches(self.slicing.global_batch_size)

    def __iter__(self) -> Iterator[Indices]:
        for index in self.batches:
            first = index * self.slicing.global_batch_size
            for a, b in self.cuts(index)[1]:
                # An empty micro-batch is run all the same, on a sample that counts nothing.
                start, end = (first + a, first + b) if a < b else (first, first + 1)
                indices = Indices(self.order[start:end].tolist())
                indices.epoch = self.epoch
                yield indices


class WantedSampler:
    """A batch sampler that yields what it is given."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted

    def __iter__(self) -> Iterator[Indices]:
        return iter(self.wanted)
