"""Functions and timers that scripts take from ``colossalai.utils``."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from unipar.compat.colossalai.accelerator import get_accelerator
from unipar.compat.colossalai_names import UTILS

__all__ = [
    "MultiTimer", "Timer", "conditional_context", "disposable", "ensure_path_exists",
    "get_current_device", "is_ddp_ignored", "set_seed",
]  # fmt: skip


def get_current_device() -> torch.device:
    """This process's device."""
    return get_accelerator().get_current_device()


def set_seed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def ensure_path_exists(filename: str) -> None:
    """Make the directory of a file."""
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


@contextlib.contextmanager
def conditional_context(
    context_manager: contextlib.AbstractContextManager[Any], enable: bool = True
) -> Iterator[None]:
    """A block within another one's, or without."""
    with context_manager if enable else contextlib.nullcontext():
        yield


def disposable(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does something at its first call alone."""
    called: list[bool] = []

    @functools.wraps(func)
    def once(*args: Any, **kwargs: Any) -> Any:
        if not called:
            called.append(True)
            return func(*args, **kwargs)
        return None

    return once


def is_ddp_ignored(p: torch.Tensor) -> bool:
    """Whether a parameter is marked as none of DDP's."""
    return getattr(p, "_ddp_to_ignore", False)


class Timer:
    """A stop watch that waits for the device."""

    def __init__(self) -> None:
        self._start = time.time()
        self._elapsed = 0.0
        self._started = False
        self._history: list[float] = []

    @property
    def has_history(self) -> bool:
        """Whether an interval was kept."""
        return bool(self._history)

    @property
    def current_time(self) -> float:
        """Seconds since 1970, when the device is done."""
        get_accelerator().synchronize()
        return time.time()

    def start(self) -> None:
        """Begin an interval."""
        self._start, self._elapsed, self._started = self.current_time, 0.0, True

    def lap(self) -> float:
        """Seconds of the interval so far."""
        return self.current_time - self._start

    def stop(self, keep_in_history: bool = False) -> float:
        """End the interval; its seconds."""
        self._elapsed, self._started = self.lap(), False
        if keep_in_history:
            self._history.append(self._elapsed)
        return self._elapsed

    def get_history_mean(self) -> float:
        """The mean of the intervals that were kept."""
        return sum(self._history) / len(self._history)

    def get_history_sum(self) -> float:
        """The sum of the intervals that were kept."""
        return sum(self._history)

    def get_elapsed_time(self) -> float:
        """Seconds of the last interval."""
        assert not self._started, "Timer is still in progress"
        return self._elapsed

    def reset(self) -> None:
        """Forget the intervals that were kept."""
        self._history, self._started, self._elapsed = [], False, 0.0


class MultiTimer:
    """Stop watches by name.

    Args:
        on: whether they run at all.
    """

    def __init__(self, on: bool = True) -> None:
        self._on = on
        self._timers: dict[str, Timer] = {}

    def start(self, name: str) -> None:
        """Begin an interval of one."""
        if self._on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool) -> float | None:
        """End an interval of one; its seconds."""
        return self._timers[name].stop(keep_in_history) if self._on else None

    def get_timer(self, name: str) -> Timer:
        """One by its name."""
        return self._timers[name]

    def reset(self, name: str | None = None) -> None:
        """Forget what one has kept, or all of them."""
        for key, timer in self._timers.items():
            if self._on and name in (None, key):
                timer.reset()

    def is_on(self) -> bool:
        """Whether they run."""
        return self._on

    def set_status(self, mode: bool) -> None:
        """Let them run, or not."""
        self._on = mode

    def __iter__(self) -> Iterator[tuple[str, Timer]]:
        yield from self._timers.items()


__getattr__ = UTILS.refusing(__name__)
