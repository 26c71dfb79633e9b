"""Ranks begin with Accelerate imported; see :mod:`unipar.testing.programs`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def _forked(forked_programs: None) -> None:
    """A program does the same however it has begun; where not, take ``new_interpreters``."""


def pytest_collection_finish(session: pytest.Session) -> None:
    # Other tests are to have a torch that it has not changed.
    if all(Path(__file__).parent in item.path.parents for item in session.items):
        os.environ["_UNIPAR_TESTING_PRELOAD"] = "unipar_accelerate.framework:load"
