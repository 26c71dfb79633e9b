"""Streams shared among ranks as Accelerate does it: each rank reads, or rank 0 for all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from unipar.errors import ConfigError
from unipar.world import World


class ShardedStream(IterableDataset):
    """One rank's samples of a stream that every rank reads.

    The last round is filled up with samples of the first one, or dropped.

    Args:
        stream: the script's.
        batch_size: of its loader.
        world: the joined processes.
        drop: whether the last round is dropped.
        split: whether a batch is cut up among ranks.
    """

    def __init__(
        self, stream: Any, batch_size: int, world: World, *, drop: bool, split: bool
    ) -> None:
        self.stream, self._rank, self._drop = stream, world.data_rank, drop
        if split and batch_size % world.data_size:
            raise ConfigError(
                f"split_batches cuts each batch into {world.data_size} equal parts, and this "
                f"DataLoader has batch_size {batch_size}. Give it a multiple of the number of "
                "ranks."
            )
        self._each = batch_size // world.data_size if split else batch_size
        self._round, self._epoch = self._each * world.data_size, 0

    def __len__(self) -> int:
        """The samples of this rank, where the stream knows how many it has."""
        rounds, rest = divmod(len(self.stream), self._round)
        return self._each * (rounds + bool(rest and not self._drop))

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next."""
        self._epoch = epoch
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.stream, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.stream, "set_epoch"):
            generator.manual_seed(self._epoch)
        samples, first = iter(self.stream), []
        while now := list(itertools.islice(samples, self._round)):
            first = first or list(now)
            if len(now) < self._round:
                if self._drop:
                    return
                now += itertools.islice(itertools.cycle(first), self._round - len(now))
            yield from now[self._each * self._rank : self._each * (self._rank + 1)]


def dispatched(
    batches: Iterator[Any], world: World, *, split: bool, drop: bool
) -> Iterator[tuple[Any, int]]:
    """This rank's shares of batches that rank 0 reads. Collective.

    Args:
        batches: of the loader; read on rank 0 alone.
        world: the joined processes.
        split: whether each batch is cut up; else as many as there are ranks are put together.
        drop: whether a last round of fewer batches is dropped.

    Yields:
        The share, and how many samples of the round are no repetition.
    """
    size = world.data_size
    places = [world.layout.coordinate("batch", rank) for rank in range(world.size)]
    first: Any = None
    while True:
        sent: list[Any] | None = None
        if world.is_main:
            taken = list(itertools.islice(batches, 1 if split else size))
            if not taken or (drop and not split and len(taken) < size):
                sent = [None] * world.size
            else:
                whole = joined(taken)
                first = cut(whole, 0, size) if first is None else first
                count = length_of(whole)
                each, rest = divmod(count, size)
                if rest and not drop:
                    whole, each = joined([whole, first]), each + 1
                sent = [(cut(whole, place * each, each), count) for place in places]
        got: list[Any] = [None]
        dist.scatter_object_list(got, sent, src=0)
        if got[0] is None:
            return
        yield got[0]


def joined(batches: list[Any]) -> Any:
    """Batches one behind the other.

    Raises:
        ConfigError: there is something other than tensors in them, or they do not fit.
    """
    first = batches[0]
    if isinstance(first, torch.Tensor):
        try:
            return torch.cat(batches)
        except RuntimeError as error:
            raise ConfigError(
                "rank 0 reads batches for all ranks, and these have other shapes than each other: "
                f"{error}. Pad them alike, or give DataLoaderConfiguration("
                "dispatch_batches=False), with which each rank reads its own."
            ) from error
    if isinstance(first, Mapping):
        return type(first)({key: joined([one[key] for one in batches]) for key in first})  # pyright: ignore[reportCallIssue]
    if isinstance(first, (list, tuple)):
        parts = [joined(list(each)) for each in zip(*batches, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    raise ConfigError(
        f"rank 0 reads batches for all ranks, and these hold {type(first).__name__}. Give "
        "DataLoaderConfiguration(dispatch_batches=False), with which each rank reads its own."
    )


def cut(data: Any, begin: int, count: int) -> Any:
    """Samples of a batch, in memory of their own."""
    if isinstance(data, torch.Tensor):
        return data[begin : begin + count].clone()
    if isinstance(data, Mapping):
        return type(data)({key: cut(value, begin, count) for key, value in data.items()})  # pyright: ignore[reportCallIssue]
    parts = [cut(one, begin, count) for one in data]
    return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)


def length_of(data: Any) -> int:
    """How many samples a batch has, by the first tensor in it."""
    while not isinstance(data, torch.Tensor):
        data = next(iter(data.values() if isinstance(data, Mapping) else data))
    return data.shape[0]
