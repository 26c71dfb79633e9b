"""Filling boxes from stored chunks, whatever their divisions, and verifying what is read."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from unipar.checkpoint.boxes import intersect, is_run, part, volume
from unipar.checkpoint.division import Chunk, Place, meeting
from unipar.checkpoint.files import FileReader, as_bytes
from unipar.checkpoint.header import check_header
from unipar.checkpoint.manifest import Manifest, TensorIndex
from unipar.checkpoint.paths import inside
from unipar.errors import CheckpointError
from unipar.state import Box

BLOCK_BYTES = 64 << 20
"""The most that is read aside at a time, unless one row is longer."""
MAX_OPEN_FILES = 64


class ChunkReader:
    """Reads tensors of one checkpoint; keeps files open between reads."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._files: dict[str, FileReader] = {}
        self._places: dict[str, Mapping[str, Place]] = {}

    def __enter__(self) -> ChunkReader:
        return self

    def __exit__(self, *error: object) -> None:
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
        for chunk in meeting(index.chunks, box):
            shared = intersect(chunk.box, box)
            if shared is not None:
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
            self._read(name, chunk, first, view)
            return
        if not sizes:
            aside = torch.empty((), dtype=index.dtype)
            self._read(name, chunk, 0, aside)
            view.copy_(aside)
            return
        row = math.prod(sizes[1:])
        rows = max(1, BLOCK_BYTES // (row * index.dtype.itemsize))
        for at in range(0, shared.sizes[0], rows):
            count = min(rows, shared.sizes[0] - at)
            aside = torch.empty((count, *sizes[1:]), dtype=index.dtype)
            self._read(name, chunk, (start[0] + at) * row, aside)
            wanted = Box((0, *start[1:]), (count, *shared.sizes[1:]))
            view.narrow(0, at, count).copy_(part(aside, (0,) * len(sizes), wanted))

    def _read(self, name: str, chunk: Chunk, first: int, out: torch.Tensor) -> None:
        """Fill ``out``, contiguous, with the chunk's elements from the ``first`` on."""
        width = out.dtype.itemsize
        self._read_bytes(name, chunk, first * width, volume(chunk.box) * width, as_bytes(out))

    def _read_bytes(
        self, name: str, chunk: Chunk, begin: int, length: int, out: memoryview
    ) -> None:
        reader = self._open(name, chunk.file)
        start, digests = chunk.place or self._places[chunk.file][chunk.key]
        reader.read(out, start, begin, length, digests, lambda: f"tensor '{name}'")

    def _open(self, name: str, file: str) -> FileReader:
        if file not in self._files:
            if len(self._files) == MAX_OPEN_FILES:
                self.close()
            try:
                self._files[file] = self._opened(file)
            except CheckpointError as error:
                raise CheckpointError(f"Cannot read tensor '{name}': {error}") from error
        return self._files[file]

    def _opened(self, file: str) -> FileReader:
        info, root = self._manifest.files[file], self._manifest.path
        if not info.header_digest:
            # Bare safetensors: in Hugging Face's cache every file is a link to one beside it.
            return FileReader(root / file, info.size)
        if file in self._places:
            return FileReader(inside(root, file), info.size)
        reader, self._places[file] = opened(self._manifest, file)
        return reader


def opened(manifest: Manifest, file: str) -> tuple[FileReader, Mapping[str, Place]]:
    """A file of a checkpoint, and where the tensors stand in it, as its header and manifest say.

    Raises:
        CheckpointError: it is missing, short or corrupt, or its header says otherwise.
    """
    reader = FileReader(inside(manifest.path, file), manifest.files[file].size)
    try:
        return reader, check_header(reader, manifest, file)
    except CheckpointError:
        reader.close()
        raise
