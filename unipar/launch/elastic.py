"""Runs whose number of ranks changes: what their processes and the launching one tell each other.

The launching process decides on the number (:mod:`unipar.launch.resizing`) and starts the whole
group again: the state of process groups, and what frameworks keep besides, cannot be regrouped
within a process. The ranks that end leave the run's state in a place that the launching process has
named, and those of the next group read it there.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unipar.errors import ConfigError
from unipar.launch.rundir import Attempt, RunDir
from unipar.utils.replacing import replacing

REQUEST = "resize"
"""The name of the file in a run's output directory that asks for another number of ranks."""

_PATIENCE = 5.0
_POLL = 0.02


@dataclass(frozen=True)
class Elastic:
    """How the number of ranks of a run may change.

    Attributes:
        sizes: the numbers of ranks that its strategy can be on, ascending.
        devices: how many devices there are; those that the ranks leave over are spares.
        requests: where another number is asked for, as :func:`ask` does.
        places: directories for the state of the run between two groups, the preferred one first.
        whole: whether each rank holds the whole state, so that one that survives can leave it.
        asked: how the user has written the range.
    """

    sizes: tuple[int, ...]
    devices: int
    requests: Path
    places: tuple[Path, ...]
    whole: bool
    asked: str

    def largest(self, devices: int) -> int | None:
        """The most ranks that so many devices are enough for; ``None`` where they are too few."""
        return max((size for size in self.sizes if size <= devices), default=None)


@dataclass(frozen=True)
class Change:
    """Why a group of ranks is another one than the group before it.

    Attributes:
        before: how many ranks there were.
        after: how many there are.
        why: in words.
        since: when the group before stopped training, in seconds since the epoch.
    """

    before: int
    after: int
    why: str
    since: float

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Change | None:
        """The change that a group has come by, or ``None``."""
        try:
            return cls(**json.loads(path.read_text()))
        except FileNotFoundError:
            return None


class Member:
    """One rank of a group that another one may follow.

    Attributes:
        places: directories for the state of the run between two groups, the preferred one first.
        restart: how many groups there were before.
        change: what has made this group; ``None`` for the first, and one started after a failure.
        kept: a directory that all groups of the run have in common.
    """

    def __init__(self, run: RunDir, restart: int, places: list[str]) -> None:
        self._resize, self._attempt = run.resize, run.attempt(restart)
        self.kept = run.root
        self.change = Change.read(run.change(restart))
        self.places = tuple(map(Path, places))
        self.restart = restart

    @property
    def asked(self) -> bool:
        """Whether the launching process wants another group."""
        return self._resize.exists()

    def refuse(self) -> None:
        """Go on as this group: it cannot leave the run's state."""
        self._resize.unlink(missing_ok=True)

    def handed_over(self, since: float) -> None:
        """Say, on one rank, that the state is complete, and when its ranks stopped training."""
        with replacing(self._attempt.handed_over) as partial:
            partial.write_text(str(since))

    def another_is_lost(self) -> bool:
        """Whether a rank is gone and the run goes on; waits a moment for the launching process."""
        deadline = time.monotonic() + _PATIENCE
        while not self._attempt.lost.exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL)
        return True

    def say_unsure(self, why: str) -> None:
        """Say why this rank does not leave the state that it holds."""
        self._attempt.unsure.write_text(why)

    def claim(self, step: int) -> bool:
        """Whether it is for this rank to leave the state after ``step`` steps: for one it is."""
        try:
            os.close(os.open(self._attempt.directory / f"whole-{step}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


@dataclass(frozen=True)
class Request:
    """A request for another number of ranks, which waits for an answer.

    Attributes:
        ranks: how many.
        reply: the file of the answer.
    """

    ranks: int
    reply: Path

    def answer(self, text: str, *, done: bool = True) -> None:
        """Say what comes of it."""
        partial = self.reply.with_suffix(".partial")
        # Who has asked may not be there any more, nor the directory.
        with contextlib.suppress(OSError):
            partial.write_text(json.dumps({"text": text, "done": done}))
            partial.replace(self.reply)


def ask(directory: Path, number: int, patience: float = 10.0) -> str:
    """Ask a run for another number of ranks; what its launching process says.

    Args:
        directory: the run's output directory.
        number: how many.
        patience: how long to wait for an answer, in seconds.

    Raises:
        ConfigError: the run cannot be on so many; nobody answers.
        OSError: the directory cannot be written.
    """
    request = directory / REQUEST
    reply = directory / f"{REQUEST}-{uuid.uuid4().hex}"
    partial = reply.with_suffix(".request")
    partial.write_text(json.dumps({"ranks": number, "reply": reply.name}))
    partial.replace(request)
    deadline = time.monotonic() + patience
    try:
        while not reply.exists():
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"the run in {directory} does not answer within {patience:g} s. Either its "
                    "number of ranks does not change while it runs (it does with devices='MIN:MAX' "
                    "and launcher='local'), or its launching process is gone, or another request "
                    "has taken the place of this one."
                )
            time.sleep(_POLL)
        answer = json.loads(reply.read_text())
    finally:
        request.unlink(missing_ok=True)
        reply.unlink(missing_ok=True)
    if not answer["done"]:
        raise ConfigError(answer["text"])
    return answer["text"]


def take_request(request: Path) -> Request | None:
    """The request that there is, which is gone then."""
    # Not where it is written: another one may take its place meanwhile.
    taken = request.with_suffix(".taken")
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        request.replace(taken)
        try:
            asked = json.loads(taken.read_text())
            return Request(int(asked["ranks"]), request.with_name(Path(asked["reply"]).name))
        finally:
            taken.unlink(missing_ok=True)
    return None


def ranks(number: int) -> str:
    """A number of ranks in words."""
    return f"{number} rank{'s' if number != 1 else ''}"


_member: Member | None = None


def open_member(run: RunDir, attempt: int, start: dict[str, Any]) -> None:
    """Make this process one of an elastic run, if its run is one."""
    global _member
    _member = Member(run, attempt, start["places"]) if start.get("places") else None


def member() -> Member | None:
    """This process as a rank of an elastic run that a launching process of ours watches."""
    return _member


def handed_over_at(attempt: Attempt) -> float | None:
    """When a group that has handed over stopped training; ``None`` for one that has not."""
    try:
        return float(attempt.handed_over.read_text())
    except FileNotFoundError:
        return None
