"""``report.html`` as a browser shows it: drawn, usable, quiet, and alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from report_browser import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CHARTS = {
    "throughput": ".barlayer .point path",
    "step-times": ".boxlayer .box",
    "speedup": ".scatterlayer .point",
    "efficiency": ".scatterlayer .point",
    "model": ".scatterlayer .point",
    "memory-by-kind": ".barlayer .point path",
    "memory-by-rank": ".barlayer .point path",
    "collectives": ".barlayer .point path",
    "traffic": ".barlayer .point path",
    "exposure": ".barlayer .point path",
    "all-reduce": ".scatterlayer .point",
    "losses": ".scatterlayer .js-line",
    "loss-differences": ".scatterlayer .js-line",
}
HEADER = "[...document.querySelectorAll('#figures-table thead th')]"
BUTTON = HEADER + ".find((one) => one.textContent.includes('{}')).querySelector('button')"
COLUMN = (
    "[...document.querySelectorAll('#figures-table tbody tr')].map((row) => "
    "row.children[{}].textContent)"
)
SORTED = HEADER + ".map((one) => one.getAttribute('aria-sort'))"


@pytest.fixture(scope="module")
def desktop(browser: Browser, report: Path) -> Iterator[Page]:
    with browser.open(report, width=1100) as page:
        yield page


def test_each_chart_is_drawn_with_its_marks_and_described(desktop: Page) -> None:
    drawn = desktop.value(
        "[...document.querySelectorAll('.chart')].map((one) => one.id)"
        ".filter((one) => !one.startsWith('chart-whole-'))"
    )
    assert drawn == [f"chart-{key}" for key in CHARTS]
    for key, marks in CHARTS.items():
        chart = f"document.getElementById('chart-{key}')"
        assert desktop.value(f"{chart}.querySelectorAll('svg.main-svg').length") > 0, key
        assert desktop.value(f"{chart}.querySelectorAll('{marks}').length") > 1, key
        alt = desktop.value(f"{chart}.getAttribute('aria-label')")
        assert alt.endswith("."), key
        assert any(letter.isdigit() for letter in alt), key


def test_a_click_sorts_and_a_second_one_turns_it_round(desktop: Page) -> None:
    speeds = desktop.value(COLUMN.format(6))
    desktop.click(BUTTON.format("strategy"))
    names = desktop.value(COLUMN.format(0))
    assert names == sorted(names)
    assert desktop.value(SORTED)[0] == "ascending"
    desktop.click(BUTTON.format("strategy"))
    assert desktop.value(COLUMN.format(0)) == sorted(names, reverse=True)
    assert desktop.value(SORTED) == ["descending", *[None] * 11]
    desktop.click(BUTTON.format("tokens/s"))
    assert desktop.value(COLUMN.format(6)) == speeds


def test_a_keyboard_sorts_by_number(desktop: Page) -> None:
    desktop.value(f"({BUTTON.format('strategy')}).focus()")
    for _ in range(9):
        desktop.press("Tab")
    assert desktop.value("document.activeElement.textContent") == "peak"
    desktop.press("Enter", "\r")
    assert desktop.value(SORTED)[9] == "ascending"
    peaks = [peak for peak in desktop.value(COLUMN.format(9)) if peak]
    numbers = [int(peak.rstrip("*")) for peak in peaks]
    assert numbers == sorted(numbers)
    assert numbers[0] < numbers[-1]
    desktop.press(" ", " ")
    assert desktop.value(COLUMN.format(9))[0].rstrip("*") == str(numbers[-1])


def test_what_is_not_known_stays_below_whichever_way(desktop: Page) -> None:
    for _ in range(2):
        desktop.click(BUTTON.format("loss"))
        assert desktop.value(COLUMN.format(11))[-1] == ""
        assert desktop.value(COLUMN.format(11))[0] != ""


def test_a_keyboard_hides_a_strategy_and_shows_it_again(desktop: Page) -> None:
    points = "document.querySelectorAll('#chart-speedup .scatterlayer .point').length"
    button = "document.querySelectorAll('#legend-speedup button')[1]"
    before = desktop.value(points)
    desktop.value(f"{button}.focus()")
    desktop.press("Enter", "\r")
    desktop.wait_for(f"{points} === {before - 3}")
    assert desktop.value(f"{button}.getAttribute('aria-pressed')") == "false"
    desktop.press(" ", " ")
    desktop.wait_for(f"{points} === {before}")
    assert desktop.value(f"{button}.getAttribute('aria-pressed')") == "true"


def test_what_is_folded_is_drawn_when_it_is_unfolded(desktop: Page) -> None:
    folded = "document.querySelector('details[data-chart=whole-step-times]')"
    boxes = f"{folded}.querySelectorAll('.boxlayer .box').length"
    assert desktop.value(boxes) == 0
    desktop.click(f"{folded}.querySelector('summary')")
    desktop.wait_for(f"{boxes} > 12")
    assert (
        desktop.value(f"{folded}.querySelector('svg.main-svg').getBoundingClientRect().width") > 400
    )
    desktop.click(f"{folded}.querySelector('summary')")


def test_the_page_follows_the_system_into_the_dark(desktop: Page) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    text = "getComputedStyle(document.querySelector('#chart-speedup .xtick text')).fill"
    mark = "getComputedStyle(document.querySelector('#chart-speedup .point')).fill"
    light = [desktop.value(one) for one in (background, text, mark)]
    desktop.set_dark(True)
    desktop.wait_for(f"{text} === 'rgb(232, 234, 237)'")
    dark = [desktop.value(one) for one in (background, text, mark)]
    assert light[:2] == ["rgb(255, 255, 255)", "rgb(27, 31, 36)"]
    assert dark[:2] == ["rgb(20, 23, 27)", "rgb(232, 234, 237)"]
    assert light[2] != dark[2]
    desktop.set_dark(False)


def test_no_complaint_and_no_request_but_for_the_file(desktop: Page, report: Path) -> None:
    assert desktop.complaints() == []
    assert desktop.requests() == [report.as_uri()]


def test_a_request_would_be_seen_and_refused(browser: Browser, report: Path) -> None:
    with browser.open(report, width=1100) as page:
        page.value(
            "document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/x'}))"
        )
        page.wait_for("document.images.length === 1")
        assert any("Content Security Policy" in one for one in page.complaints())


@pytest.mark.thorough
def test_a_telephone_shows_it_without_scrolling_sideways(browser: Browser, report: Path) -> None:
    with browser.open(report, width=360) as page:
        assert page.value("document.documentElement.scrollWidth") == 360
        wider = (
            "[...document.querySelectorAll('main > section, .chart svg.main-svg, pre, .words')]"
            ".filter((one) => one.getBoundingClientRect().right > 360).length"
        )
        assert page.value(wider) == 0
        small = (
            "[...document.querySelectorAll('th button, .legend button')]"
            ".filter((one) => one.getBoundingClientRect().height < 24).length"
        )
        assert page.value(small) == 0
        assert page.complaints() == []
