"""Shared by all tests; the ``world_pool`` fixture comes from unipar's own pytest plugin."""

from __future__ import annotations

import pytest

from unipar.testing.plugin import add_options


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)
