from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from leftovers import processes_of


@pytest.fixture(autouse=True)
def no_process_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever becomes of a run, its processes end."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    deadline = time.monotonic() + 30
    while left := processes_of(str(tmp_path)):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
