"""A browser, and a report of a made-up result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import report_browser
from synthetic_bench import bench_result

from unipar.benchmark.report import html


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    html.write(bench_result(), path)
    return path


@pytest.fixture(scope="module")
def browser(
    tmp_path_factory: pytest.TempPathFactory,
    still_running: Callable[[Iterable[int]], list[int]],
) -> Iterator[report_browser.Browser]:
    executable = report_browser.find()
    if executable is None:
        pytest.skip(
            f"none of {', '.join(report_browser.NAMES)} is on the path, so no page can be opened. "
            "On Debian: apt-get install chromium"
        )
    opened = report_browser.Browser(executable, tmp_path_factory.mktemp("browser"))
    yield opened
    assert still_running(opened.close()) == []
