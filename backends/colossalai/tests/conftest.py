"""Colossal-AI lives in an environment of its own; elsewhere its tests cannot run."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from unipar.testing.plugin import preload

HERE = find_spec("colossalai") is not None and find_spec("unipar_colossalai") is not None

collect_ignore_glob = [] if HERE else ["test_*.py"]


def pytest_report_header() -> str | None:
    if HERE:
        return None
    return "colossalai: not installed in this environment; its tests are left out"


@pytest.fixture(scope="module", autouse=True)
def _forked(forked_programs: None) -> None:
    """A program does the same however it has begun; where not, take ``new_interpreters``."""


def pytest_collection_finish(session: pytest.Session) -> None:
    preload(session, Path(__file__).parent, "unipar_colossalai.framework:load")
