"""Ranks begin with Accelerate imported; see :mod:`unipar.testing.programs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from unipar.testing.plugin import preload


@pytest.fixture(scope="module", autouse=True)
def _forked(forked_programs: None) -> None:
    """A program does the same however it has begun; where not, take ``new_interpreters``."""


def pytest_collection_finish(session: pytest.Session) -> None:
    preload(session, Path(__file__).parent, "unipar_accelerate.framework:load")
