"""The errors that a user can meet, and what each means."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable, Sequence


class UniparError(Exception):
    """Base class of every error that unipar raises on purpose."""


class ConfigError(UniparError):
    """The run asked for something that cannot be done; the message says what to change."""


class DataError(UniparError):
    """The data, or a batch made from it, cannot be trained on."""


class CheckpointError(UniparError):
    """A checkpoint cannot be written or read; the message names the file or the tensor.

    Attributes:
        agreed: whether every rank raises it at the same place, so that none waits for another.
    """

    agreed = False


class NonFiniteLossError(DataError):
    """The loss became NaN or infinite; carries the step (1-based) at which it did."""

    def __init__(self, message: str, *, step: int) -> None:
        super().__init__(message)
        self.step = step


class InstallError(UniparError):
    """A framework could not be installed; the message holds what failed, and where its log is."""


class WorkerError(UniparError):
    """A worker process failed; carries the first failing rank and its own traceback.

    Attributes:
        rank: the rank that failed first, or ``None`` when it is not known.
        step: the training step (1-based) that the rank was in, or ``None`` before the first one.
        worker_traceback: the traceback as text, empty when the process was killed from outside.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        step: int | None = None,
        worker_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.step = step
        self.worker_traceback = worker_traceback


class Terminated(SystemExit):
    """A run was ended by SIGTERM or SIGHUP, after saving what it was to save.

    Not caught, it ends the script with the exit code that a shell gives to the signal.

    Attributes:
        signal: the signal.
        code: 128 and its number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)

    def __str__(self) -> str:
        return self.signal.name


def first_few(names: Sequence[str], most: int = 4) -> str:
    """The names, as many of them as a message has room for."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the nearest allowed name, or an empty string."""
    close = difflib.get_close_matches(given, list(allowed), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""
