"""The private directory through which the launching process and its workers talk."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

_ROOM = 1 << 20
"""Bytes; what workers write is less, but for what the run's function returns."""


def fresh(directory: Path) -> None:
    """Have a network file system look anew at what there is in a directory.

    Of a file that was not there NFS remembers that for up to a minute (``acdirmax``, nfs(5)), and
    asks the server again when the directory is opened.
    """
    with contextlib.suppress(OSError):
        os.close(os.open(directory, os.O_RDONLY))


@dataclass(frozen=True)
class Attempt:
    """The files of one start of the group of workers; a restart gets a directory of its own."""

    directory: Path

    def record(self, rank: int) -> Path:
        """How this rank failed (JSON); absent if it did not, or could not say."""
        return self.directory / f"rank-{rank}.json"

    def note(self, rank: int) -> Path:
        """The same, left as soon as the error was on its way out; the rank may yet be at work."""
        return self.directory / f"rank-{rank}.note"

    def returned(self, rank: int) -> Path:
        """There once the rank's function has returned."""
        return self.directory / f"rank-{rank}.returned"

    def error(self, rank: int) -> Path:
        """The rank's exception itself, where it is one of unipar's own."""
        return self.directory / f"rank-{rank}.error"

    def mark(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.mark"

    def stack(self, rank: int) -> Path:
        """The rank's Python stack, written when the launching process asks for it."""
        return self.directory / f"rank-{rank}.stack"

    @property
    def lost(self) -> Path:
        """There once the launching process knows that ranks are lost, and the run goes on."""
        return self.directory / "lost"

    @property
    def unsure(self) -> Path:
        """Why the state in the memory of a rank is not taken."""
        return self.directory / "unsure"

    @property
    def handed_over(self) -> Path:
        """When all ranks began to hand over to another number of ranks; there once they have."""
        return self.directory / "handed-over"

    def log(self, rank: int) -> Path:
        """Return the path of what the rank printed; rank 0 of a run here prints to the terminal."""
        return self.directory / f"rank-{rank}.log"


@dataclass(frozen=True)
class RunDir:
    """The directory of one call of :func:`unipar.launch.run`."""

    root: Path

    @property
    def start(self) -> Path:
        """Path of what a worker needs before its first import (JSON)."""
        return self.root / "start.json"

    @property
    def payload(self) -> Path:
        return self.root / "payload.pkl"

    @property
    def result(self) -> Path:
        return self.root / "result.pkl"

    @property
    def request(self) -> Path:
        """The number of a signal that rank 0 is to send itself, where nothing else reaches it."""
        return self.root / "signal"

    @property
    def resize(self) -> Path:
        """There while the ranks are asked to hand over to another number of them."""
        return self.root / "resize"

    def change(self, restart: int) -> Path:
        """Path of what has made the number of ranks of a start another one (JSON), if it is."""
        return self.root / f"change-{restart}.json"

    def attempt(self, restart: int) -> Attempt:
        return Attempt(self.root / f"attempt-{restart}")

    def has_room(self) -> bool:
        """Return whether the records and results of workers still fit."""
        probe = self.root / "room"
        try:
            probe.write_bytes(bytes(_ROOM))
        except OSError:
            return False
        finally:
            probe.unlink(missing_ok=True)
        return True
