"""Programs begin with torch imported; see :mod:`unipar.testing.programs`."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module", autouse=True)
def _forked(forked_programs: None) -> None:
    """What a program does is the same however it has begun; ``new_interpreters`` where it is not."""
