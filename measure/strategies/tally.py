"""A plugin of pytest: write how each test ended, and how many were to be run, to $TALLY.

A run that is killed writes nothing, and one that is stopped has fewer ends than tests. Where
$TALLY_ONLY is a JSON list of names, no other tests are run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

_outcomes: dict[str, str] = {}
_ended: dict[str, str] = {}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    only = set(json.loads(os.environ.get("TALLY_ONLY", "[]")))
    if only:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in only])
        items[:] = [item for item in items if item.nodeid in only]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid
    # Set-up, call and teardown may each fail or be skipped; most often they only pass.
    if report.outcome != "passed":
        _outcomes[name] = (
            "failed" if "failed" in (report.outcome, _outcomes.get(name)) else "skipped"
        )
    if report.when == "teardown":
        _ended[name] = _outcomes.get(name, "passed")


def pytest_sessionfinish(session: pytest.Session) -> None:
    tally = {"tests": session.testscollected, "ended": _ended}
    Path(os.environ["TALLY"]).write_text(json.dumps(tally))
