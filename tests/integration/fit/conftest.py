"""``fit`` of the small run, in a directory of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import build, data, settings

from unipar import RunResult, fit


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunResult]:
    """``run(model, data, **changes)``, all of which have defaults."""

    def call(model: Any = None, samples: Any = None, **changes: Any) -> RunResult:
        return fit(
            build() if model is None else model,
            data() if samples is None else samples,
            **settings(tmp_path / "run", **changes),
        )

    return call
