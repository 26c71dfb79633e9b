"""A script's surroundings, for tests that are one in the process of pytest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from unipar.compat.run import current


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A directory without configuration, and no run left behind."""
    monkeypatch.setattr("unipar.compat.run.file_beside_script", lambda: tmp_path / "unipar.yaml")
    monkeypatch.chdir(tmp_path)
    yield
    current.close()
