"""A run that a migrated script would open, without a script."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from unipar.migrated import script
from unipar.migrated.script.run import current


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The settings of a run on one process, which is ended."""
    file = tmp_path / "unipar.yaml"
    file.write_text("strategy: single\ndevice: cpu\n")
    monkeypatch.setattr(current, "file", file)
    yield file
    script.close()
