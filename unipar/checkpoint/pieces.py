"""Files on their way from one host to others, in pieces that fit a collective."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from unipar.checkpoint.files import as_bytes

_PIECE = 16 << 20


def pieces(sizes: Mapping[str, int]) -> Iterator[tuple[str, int, int]]:
    """The file, the first byte and the length of each piece; an empty file is one piece."""
    for name in sorted(sizes):
        for start in range(0, max(sizes[name], 1), _PIECE):
            yield name, start, min(_PIECE, sizes[name] - start)


class Pieces:
    """Files that leave this host or arrive.

    What goes wrong first is kept, and the host takes part in the rest all the same: others wait for
    each piece.

    Attributes:
        error: what went wrong first.
    """

    def __init__(self) -> None:
        self.error: str | None = None

    def read(self, path: Path, start: int, length: int) -> torch.Tensor:
        """A piece of a file that leaves."""
        piece = torch.zeros(length, dtype=torch.uint8)
        with self.kept(path), path.open("rb") as file:
            file.seek(start)
            if file.readinto(as_bytes(piece)) != length:
                raise OSError(0, "shorter than it was")
        return piece

    def take(self, path: Path, piece: torch.Tensor) -> None:
        """Put a piece that has arrived at the end of its file."""
        if self.error is not None:
            return
        with self.kept(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(as_bytes(piece))

    @contextlib.contextmanager
    def kept(self, path: Path) -> Iterator[None]:
        """Keep what the disk, or what takes its place, refuses in the block."""
        try:
            yield
        except OSError as error:
            self.error = self.error or f"{error.filename or path}: {error.strerror or error}"
