"""Filling boxes from stored chunks, whatever their divisions, and verifying what is read."""

from __future__ import annotations

import math
from types import TracebackType

import torch

from unipar.checkpoint.boxes import intersect, is_run, part
from unipar.checkpoint.files import FileReader, as_bytes
from unipar.checkpoint.manifest import Chunk, Manifest, TensorIndex
from unipar.state import Box

BLOCK_BYTES = 64 << 20
"""The most that is read aside at a time, unless one row is longer."""
MAX_OPEN_FILES = 64


class ChunkReader:
    """Reads tensors of one checkpoint; keeps files open between reads."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._files: dict[str, FileReader] = {}

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def fill(self, name: str, index: TensorIndex, box: Box, target: torch.Tensor) -> None:
        """Fill ``target``, which is ``box`` of the tensor, converting dtype and device.

        Raises:
            CheckpointError: a file is missing, short or corrupt; names the file and the tensor.
        """
        for chunk in index.chunks:
            if shared := intersect(chunk.box, box):
                view = part(target.detach(), box.offsets, shared)
                self._fill(name, index, chunk, shared, view)

    def _fill(
        self, name: str, index: TensorIndex, chunk: Chunk, shared: Box, view: torch.Tensor
    ) -> None:
        sizes = chunk.box.sizes
        start = tuple(a - b for a, b in zip(shared.offsets, chunk.box.offsets, strict=True))
        direct = (
            view.dtype == index.dtype
            and view.device.type == "cpu"
            and view.is_contiguous()
            and is_run(shared.sizes, sizes)
        )
        if direct:
            strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
            first = sum(a * b for a, b in zip(start, strides, strict=True))
            self._read(name, index, chunk, first, as_bytes(view))
            return
        if not sizes:
            aside = torch.empty((), dtype=index.dtype)
            self._read(name, index, chunk, 0, as_bytes(aside))
            view.copy_(aside)
            return
        row = math.prod(sizes[1:])
        rows = max(1, BLOCK_BYTES // (row * index.dtype.itemsize))
        inner = Box((0, *start[1:]), shared.sizes)
        for at in range(0, shared.sizes[0], rows):
            count = min(rows, shared.sizes[0] - at)
            aside = torch.empty((count, *sizes[1:]), dtype=index.dtype)
            self._read(name, index, chunk, (start[0] + at) * row, as_bytes(aside))
            wanted = Box(inner.offsets, (count, *shared.sizes[1:]))
            view.narrow(0, at, count).copy_(part(aside, (0,) * len(sizes), wanted))

    def _read(
        self, name: str, index: TensorIndex, chunk: Chunk, first: int, out: memoryview
    ) -> None:
        """Read elements ``first …`` of a chunk."""
        width = index.dtype.itemsize
        self._open(chunk.file).read(
            out,
            chunk.start,
            first * width,
            math.prod(chunk.box.sizes) * width,
            chunk.digests,
            lambda: f"tensor '{name}'",
        )

    def _open(self, file: str) -> FileReader:
        if file not in self._files:
            if len(self._files) == MAX_OPEN_FILES:
                self.close()
            size, length, expected = self._manifest.files[file]
            self._files[file] = FileReader(
                self._manifest.path / file, size, (length, expected) if length else None
            )
        return self._files[file]
