"""What was started, as this process sees it."""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from enum import Enum
from typing import Any, ClassVar


class Status(str, Enum):
    """How far something that was started has come."""

    WAITING = "waiting"
    """It has no machines yet."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELED = "canceled"

    @property
    def ended(self) -> bool:
        return self not in (Status.WAITING, Status.RUNNING)


class Handle(ABC):
    """Something that was started.

    Attributes:
        name: what messages call it, such as ``"Slurm job 17"``.
        outlives: whether it goes on when this process ends.
        poll: seconds between two looks at it.
    """

    name: str
    outlives: ClassVar[bool] = False
    poll: ClassVar[float] = 0.2

    @abstractmethod
    def status(self) -> Status:
        """How far it has come; returns at once."""

    @abstractmethod
    def output(self) -> str:
        """What rank 0 has printed since the last call; returns at once."""

    @abstractmethod
    def interrupt(self, number: signal.Signals) -> None:
        """Pass a signal on to the run: to finish its step, save and end, or to save and go on."""

    @abstractmethod
    def cancel(self) -> None:
        """End it now, and wait until none of its processes is left."""

    @abstractmethod
    def result(self) -> Any:
        """What rank 0's call has returned; call it when ``status`` says that it has ended.

        Raises:
            UniparError: a rank raised one; it is raised here as it is.
            WorkerError: a rank raised anything else, was killed, or stopped taking part.
        """

    def close(self) -> None:  # noqa: B027
        """Give up what is held here; called once, when nobody asks it any more."""

    def logs(self) -> Iterator[str]:
        """What rank 0 prints, as it comes, until it has ended."""
        while True:
            ended = self.status().ended
            if text := self.output():
                yield text
            if ended:
                return
            time.sleep(self.poll)
