"""Shared by all tests; the ``world_pool`` fixture comes from unipar's own pytest plugin."""

from __future__ import annotations

import signal

import pytest

from unipar.testing.plugin import add_options

# A test run in the background of a shell inherits an ignored SIGINT, and so would what it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)
