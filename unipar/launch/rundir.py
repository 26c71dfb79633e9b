"""The private directory through which the launching process and its workers talk."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from unipar.errors import ConfigError

_ROOM = 1 << 20
"""Bytes; what workers write is less, but for what the run's function returns."""


def no_room(error: OSError) -> ConfigError:
    """The error for temporary files that cannot be written."""
    return ConfigError(f"a temporary file cannot be written: {error.strerror}. {tmpdir_remedy()}")


def tmpdir_remedy() -> str:
    """What to do where the temporary directory is full."""
    directory = tempfile.tempdir or os.environ.get("TMPDIR") or "/tmp"
    return (
        f"The temporary directory is {directory}: make room in it, or set the environment variable "
        "TMPDIR to a directory that has some."
    )


@contextlib.contextmanager
def temporary_files() -> Iterator[None]:
    """Around what writes temporary files, and nothing else."""
    try:
        yield
    except OSError as error:
        raise no_room(error) from error


@dataclass(frozen=True)
class Attempt:
    """The files of one start of the group of workers; a restart gets a directory of its own."""

    directory: Path

    def record(self, rank: int) -> Path:
        """How this rank failed (JSON); absent if it did not, or could not say."""
        return self.directory / f"rank-{rank}.json"

    def error(self, rank: int) -> Path:
        """The rank's exception itself, where it is one of unipar's own."""
        return self.directory / f"rank-{rank}.error"

    def mark(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.mark"

    def stack(self, rank: int) -> Path:
        """The rank's Python stack, written when the launching process asks for it."""
        return self.directory / f"rank-{rank}.stack"

    def log(self, rank: int) -> Path:
        """What the rank printed; rank 0 prints to the terminal instead."""
        return self.directory / f"rank-{rank}.log"


@dataclass(frozen=True)
class RunDir:
    """The directory of one call of :func:`unipar.launch.run`: mode 0700, removed at its end."""

    root: Path

    @classmethod
    def create(cls) -> RunDir:
        with temporary_files():
            return cls(Path(tempfile.mkdtemp(prefix="unipar-")))

    @property
    def start(self) -> Path:
        """What a worker needs before its first import (JSON)."""
        return self.root / "start.json"

    @property
    def payload(self) -> Path:
        return self.root / "payload.pkl"

    @property
    def result(self) -> Path:
        return self.root / "result.pkl"

    def attempt(self, restart: int) -> Attempt:
        return Attempt(self.root / f"attempt-{restart}")

    def has_room(self) -> bool:
        """Whether the records and results of workers still fit."""
        probe = self.root / "room"
        try:
            probe.write_bytes(bytes(_ROOM))
        except OSError:
            return False
        finally:
            probe.unlink(missing_ok=True)
        return True
