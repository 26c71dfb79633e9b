"""Shared by all tests; the ``world_pool`` fixture comes from unipar's own pytest plugin."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable

import psutil
import pytest
from hypothesis import settings

from unipar.testing.plugin import add_options

# A test run in the background of a shell ignores these two, and so would what it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
# No time limit on an example: the machine that runs the tests has other work too.
settings.register_profile("unipar", deadline=None, max_examples=50)
settings.load_profile("unipar")


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


@pytest.fixture(scope="session")
def still_running() -> Callable[[Iterable[int]], list[int]]:
    """Those of some processes that still run after ten seconds; at once where none does."""
    return _still_running


def _still_running(pids: Iterable[int]) -> list[int]:
    pids, deadline = list(pids), time.monotonic() + 10
    while (left := [pid for pid in pids if _runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _runs(pid: int) -> bool:
    # A dead orphan is collected by the system's first process: at once, later, or never.
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
