"""The parts that a stored tensor is divided into, in columns that are read when they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, overload

import numpy as np

from unipar.checkpoint.boxes import intersect
from unipar.checkpoint.runs import Column, Runs, length, value_at, values
from unipar.state import Box


class Place(NamedTuple):
    """Where the bytes of a part stand in its file: contiguous, in row-major order.

    Attributes:
        start: the first of them.
        digests: the xxh3 of each piece of them; ``None`` where none were stored.
    """

    start: int
    digests: tuple[str, ...] | None


class Chunk(NamedTuple):
    """A stored part of a tensor.

    Attributes:
        box: which part.
        file: the file's path, relative to the checkpoint.
        key: what the file calls the tensor.
        place: its place in the file; ``None`` where the file's own header says it.
    """

    box: Box
    file: str
    key: str
    place: Place | None = None


class Parts(NamedTuple):
    """Columns of parts: ``(parts,)`` numbers of files, ``(parts, dims)`` of boxes."""

    files: Column
    offsets: Column
    sizes: Column


@dataclass(frozen=True)
class Division(Sequence[Chunk]):
    """The parts of a tensor, each in a file of its own.

    A tensor that is divided evenly over any number of ranks takes no more room than a whole one.

    Attributes:
        key: what the files call the tensor.
        files: the number of each part's file.
        offsets: for each dim, where each part begins.
        sizes: for each dim, how long it is.
        paths: the files that are numbered.
    """

    key: str
    files: Runs
    offsets: tuple[Runs, ...]
    sizes: tuple[Runs, ...]
    paths: Sequence[str] = field(repr=False, compare=False)

    def __len__(self) -> int:
        return length(self.files)

    @overload
    def __getitem__(self, index: int) -> Chunk: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Chunk]: ...
    def __getitem__(self, index: int | slice) -> Chunk | Sequence[Chunk]:
        if isinstance(index, slice):
            return list(self)[index]
        offsets = tuple(value_at(runs, index) for runs in self.offsets)
        sizes = tuple(value_at(runs, index) for runs in self.sizes)
        return Chunk(Box(offsets, sizes), self.paths[value_at(self.files, index)], self.key)

    def __iter__(self) -> Iterator[Chunk]:
        return self._chunks(self.parts(), np.arange(len(self)))

    def parts(self) -> Parts:
        """All parts, multiplied out."""
        num = len(self)

        def columns(dims: Sequence[Runs]) -> Column:
            if not dims:
                return np.empty((num, 0), np.int64)
            return np.stack([values(runs) for runs in dims], axis=1)

        return Parts(values(self.files), columns(self.offsets), columns(self.sizes))

    def meeting(self, box: Box) -> Iterator[Chunk]:
        """The parts that share elements with a box."""
        parts = self.parts()
        offsets, sizes = (np.array(side, np.int64) for side in box)
        first = np.maximum(parts.offsets, offsets)
        last = np.minimum(parts.offsets + parts.sizes, offsets + sizes)
        return self._chunks(parts, np.flatnonzero((first < last).all(axis=1)))

    def _chunks(self, parts: Parts, numbers: Column) -> Iterator[Chunk]:
        for number in numbers.tolist():
            box = Box(tuple(parts.offsets[number].tolist()), tuple(parts.sizes[number].tolist()))
            yield Chunk(box, self.paths[int(parts.files[number])], self.key)


def meeting(chunks: Sequence[Chunk], box: Box) -> Iterator[Chunk]:
    """The parts that share elements with a box."""
    if isinstance(chunks, Division):
        return chunks.meeting(box)
    return (chunk for chunk in chunks if intersect(chunk.box, box) is not None)
