"""Where CI is true, a test that is skipped has failed; see the markers for what may be missing.

A reference is computed on one thread, as ranks compute: on several, sums are rounded otherwise.

Garbage is collected from what tests make, and not from what is imported and collected before them:
to look through that takes half a second each time.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from typing import Any

import pytest

_MAY_BE_MISSING = ("gpu", "extra", "root")

os.environ.setdefault("OMP_NUM_THREADS", "1")
gc.disable()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    may_be = any(map(item.get_closest_marker, _MAY_BE_MISSING)) or hasattr(report, "wasxfail")
    if report.skipped and not may_be and os.environ.get("CI") == "true":
        reason: Any = report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason[2]}\nWhere CI is true it must not be."
    return report
