"""Bytes on disk with checksums: written as they come, verified as they are read."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash

from unipar.checkpoint.paths import open_regular
from unipar.errors import CheckpointError

PIECE_BYTES = 1 << 20
"""Data are hashed in pieces of this size: a rank that wants a slice verifies only what it reads."""


def digest(data: bytes | memoryview) -> str:
    """The xxh3 (64 bits) of ``data``, in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def num_pieces(nbytes: int) -> int:
    """How many pieces with a digest each a run of bytes has."""
    return -(-nbytes // PIECE_BYTES)


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor; nothing is copied."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as contiguous host memory: itself where it already is that, else a copy."""
    return tensor.detach().to("cpu").contiguous()


class FileWriter:
    """A new file, written at given positions and flushed to the disk when closed."""

    def __init__(self, path: Path, header: bytes = b"") -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self._put(memoryview(header), 0)
        except OSError:
            self.close(sync=False)
            raise

    def write(self, data: memoryview, start: int) -> list[str]:
        """Write ``data`` at byte ``start``, and return the digest of each piece of it."""
        digests = []
        for at in range(0, len(data), PIECE_BYTES):
            piece = data[at : at + PIECE_BYTES]
            digests.append(digest(piece))
            self._put(piece, start + at)
        return digests

    def begin_with(self, header: bytes) -> None:
        """Write the first bytes of the file, which need not come first."""
        self._put(memoryview(header), 0)

    def _put(self, data: memoryview, start: int) -> None:
        # Plain code: it runs for every piece, and a training step of another thread waits for it.
        try:
            while data:
                written = os.pwrite(self._fd, data, start)
                data, start = data[written:], start + written
        except OSError as error:
            # Those of ``pwrite`` and ``fsync`` carry none.
            error.filename = str(self.path)
            raise

    def close(self, *, sync: bool = True) -> None:
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        try:
            if sync:
                os.fsync(fd)
        except OSError as error:
            error.filename = str(self.path)
            raise
        finally:
            os.close(fd)

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(sync=kind is None)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class FileReader:
    """A regular file open for reading at given positions.

    Args:
        path: the file.
        size: how many bytes it must have.

    Raises:
        CheckpointError: the file is missing, no regular file, or has another size.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._fd = open_regular(path)
        found = os.fstat(self._fd).st_size
        if found != size:
            self.close()
            raise CheckpointError(
                f"{path} is damaged: it has {found} bytes and should have {size}."
            )
        self._size = size

    def __enter__(self) -> FileReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def header(self, length: int, expected: str) -> bytes:
        """The first ``length`` bytes, whose digest must be ``expected``.

        Raises:
            CheckpointError: it is another, or the file is shorter.
        """
        assert length <= self._size, (self.path, length)
        data = bytearray(length)
        self._get(memoryview(data), 0, lambda: "its header")
        if digest(memoryview(data)) != expected:
            raise CheckpointError(f"{self.path} is damaged: the checksum of its header differs.")
        return bytes(data)

    def read(
        self,
        out: memoryview,
        start: int,
        begin: int,
        length: int,
        digests: Sequence[str] | None,
        what: Callable[[], str],
    ) -> None:
        """Fill ``out`` with bytes ``begin …`` of a run of ``length`` bytes, verifying them.

        Args:
            out: takes ``len(out)`` bytes.
            start: where the run begins in the file.
            begin: the first byte wanted of it.
            length: bytes in the whole run.
            digests: of each piece of the run; ``None`` where none were stored.
            what: names what is being read, for error messages.

        Raises:
            CheckpointError: the file is short, or a checksum differs.
        """
        end = begin + len(out)
        if digests is None:
            self._get(out, start + begin, what)
            return
        scratch = None
        for index in range(begin // PIECE_BYTES, -(-end // PIECE_BYTES)):
            first = index * PIECE_BYTES
            last = min(first + PIECE_BYTES, length)
            if begin <= first and last <= end:
                piece = out[first - begin : last - begin]
            else:
                scratch = scratch or bytearray(PIECE_BYTES)
                piece = memoryview(scratch)[: last - first]
            self._get(piece, start + first, what)
            if digest(piece) != digests[index]:
                raise CheckpointError(
                    f"{self.path} is damaged: the checksum of {what()} differs "
                    f"(bytes {start + first} to {start + last})."
                )
            if piece.obj is scratch:
                low, high = max(begin, first), min(end, last)
                out[low - begin : high - begin] = piece[low - first : high - first]

    def _get(self, out: memoryview, start: int, what: Callable[[], str]) -> None:
        while out:
            try:
                count = os.preadv(self._fd, [out], start)
            except OSError as error:
                raise CheckpointError(
                    f"Cannot read {what()} from {self.path}: {error.strerror}."
                ) from error
            if not count:
                raise CheckpointError(f"{self.path} is damaged: it ends early, at byte {start}.")
            out, start = out[count:], start + count

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
