"""``report.html``: one file with everything in it, which asks no network for anything."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from unipar.benchmark.recommend import drifts, name
from unipar.benchmark.report import answers, rows, text
from unipar.benchmark.report.rows import Column, Figure, Rows
from unipar.benchmark.result import BenchResult
from unipar.errors import ConfigError

if TYPE_CHECKING:
    from unipar.benchmark.report.charts.drawing import Chart

FOLD = 12
"""Above so many cells the charts show the best of them, and all when they are unfolded."""


def write(result: BenchResult, path: str | Path) -> None:
    """Write the report.

    Args:
        result: what to show.
        path: of the file.

    Raises:
        ConfigError: plotly is not installed, or the file cannot be written.
    """
    page = render(result)
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"the report cannot be written to {path}: {error}.") from error


def require() -> None:
    """Find out, without importing it, whether there is what draws the charts.

    Raises:
        ConfigError: plotly is not installed.
    """
    if find_spec("plotly") is None:
        raise ConfigError(
            "a benchmark's report needs plotly, which is not installed. "
            "Run: pip install 'unipar[bench]'"
        )


def render(result: BenchResult) -> str:
    """The page.

    Raises:
        ConfigError: plotly is not installed.
    """
    require()
    from plotly.offline import get_plotlyjs

    from unipar.benchmark.report.charts import CHARTS
    from unipar.benchmark.report.charts.drawing import DARK_PALETTE, PALETTE, Chart

    drawn = [(entry, entry.draw(result)) for entry in CHARTS]
    charts = {entry: chart for entry, chart in drawn if isinstance(chart, Chart)}
    missing = [(entry, lack) for entry, lack in drawn if not isinstance(lack, Chart)]
    folded: dict[str, Chart] = {}
    if few := _best(result):
        for entry, whole in charts.items():
            best = entry.draw(few)
            # Some charts are not about cells, and of some the best leave nothing.
            if isinstance(best, Chart) and _json(best) != _json(whole):
                charts[entry], folded[entry.key] = best, whole
    found = rows.of(result)
    sections = {
        "Table": _table_section(found),
        **{
            entry.title: _chart_section(entry.key, chart, folded.get(entry.key))
            for entry, chart in charts.items()
        },
        "Charts left out": _items(f"{entry.title}: {lack.reason}" for entry, lack in missing),
        "Not measured": _failures(found),
        "Traces": _items(f"{name(one)}: {file}" for one in result.cells for file in one.traces),
        "Environment": _environment(result),
        "Run it again": _code(result.job.command),
        "Run file": _code(result.job.run_file),
    }
    sections = {title: body for title, body in sections.items() if body}
    data = {
        "light": PALETTE,
        "dark": DARK_PALETTE,
        "figures": {
            **{entry.key: json.loads(_json(chart)) for entry, chart in charts.items()},
            **{f"whole-{key}": json.loads(_json(chart)) for key, chart in folded.items()},
        },
    }
    return Template(_file("page.html")).substitute(
        title=escape(f"unipar bench: {result.job.model}"),
        facts=escape(_facts(result)),
        incomplete=_incomplete(result),
        recommendation=escape(result.recommendation),
        answers=_answers(result),
        css=_file("page.css"),
        links=_links(sections),
        sections="\n".join(_section(title, body) for title, body in sections.items()),
        data=json.dumps(data).replace("<", r"\u003c"),
        plotly=base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode(),
        js=_file("page.js"),
    )


def _json(chart: Chart) -> str:
    written: Any = chart.figure.to_json()
    return written


def _file(name: str) -> str:
    return resources.files("unipar.benchmark.report").joinpath(name).read_text(encoding="utf-8")


def _facts(result: BenchResult) -> str:
    job, machine = result.job, result.machine
    return (
        f"{job.parameters:,} parameters, {job.global_batch_size:,} samples a step. "
        f"{job.repeats} repeats of {job.steps} steps after {job.warmup} of warm-up. "
        f"{', '.join(machine.accelerators) or machine.processor}, {machine.date}."
    )


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def _links(titles: Iterable[str]) -> str:
    items = "".join(f'<li><a href="#{_slug(title)}">{escape(title)}</a></li>' for title in titles)
    return f"<ul>{items}</ul>"


def _section(title: str, body: str) -> str:
    slug = _slug(title)
    return (
        f'<section aria-labelledby="{slug}"><h2 id="{slug}">{escape(title)}</h2>\n{body}</section>'
    )


def _chart_section(key: str, chart: Chart, whole: Chart | None) -> str:
    """A chart, and below it, folded, the same of all cells where it has the fastest only."""
    if whole is None:
        return _chart(key, chart)
    return (
        f'<p class="note">The {FOLD} fastest whose loss is right.</p>{_chart(key, chart)}'
        f'<details data-chart="whole-{key}"><summary>The same of all</summary>'
        f"{_chart(f'whole-{key}', whole)}</details>"
    )


def _chart(key: str, chart: Chart) -> str:
    alt = escape(chart.alt)
    return (
        f'<figure><div class="chart" id="chart-{key}" role="img" aria-label="{alt}" '
        f'style="min-height:{chart.figure.layout.height}px"></div>'
        f'<ul class="legend" id="legend-{key}" aria-label="Show or hide"></ul>'
        f"<figcaption>{alt}</figcaption></figure>"
    )


def _best(result: BenchResult) -> BenchResult | None:
    """The same with the best cells only; ``None`` where there are not too many."""
    if len(result.measured) <= FOLD:
        return None
    # A loss that is wrong is no reason to be shown before one that is right.
    kept = {cell.cell for cell in sorted(result.measured, key=drifts)[:FOLD]}
    labels = {(cell.label, cell.raw) for cell in kept}
    return result.model_copy(
        update={
            "cells": [cell for cell in result.cells if cell.cell in kept],
            "scaling": [one for one in result.scaling if (one.label, False) in labels],
        }
    )


def _incomplete(result: BenchResult) -> str:
    told = answers.incomplete(result)
    return f'<p class="incomplete" role="alert">{escape(told)}</p>' if told else ""


def _answers(result: BenchResult) -> str:
    return "".join(
        f"<div><dt>{escape(question)}</dt><dd>{escape(answer)}</dd></div>"
        for question, answer in answers.of(result)
    )


def _code(written: str) -> str:
    return f"<pre><code>{escape(written)}</code></pre>" if written else ""


def _table_section(found: Rows) -> str:
    if not found.columns:
        return ""
    head = "".join(_header(column) for column in found.columns)
    body = "\n".join(
        "<tr>" + "".join(_entry(figure, index) for index, figure in enumerate(row)) + "</tr>"
        for row in found.rows
    )
    note = (
        "* best of its column; ~ as fast as another on as many devices, within the noise; "
        "! the loss drifts. A heading sorts."
    )
    return (
        '<div class="scroll" role="region" aria-label="Table of figures" tabindex="0">'
        f'<table id="figures-table"><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>'
        f'</div><p class="note">{escape(note)}</p>'
        + _titled("Equally fast, within the noise", found.ties)
        + _titled("Step time beside a loop written by hand", found.overheads)
    )


def _header(column: Column) -> str:
    sorted_ = ' aria-sort="descending"' if column.title.endswith("s/s") else ""
    unit = f'<span class="unit">{escape(column.unit)}</span>' if column.unit else ""
    title = escape(column.title)
    return (
        f'<th scope="col" data-first="{column.first}"{sorted_}>'
        f'<button type="button">{title}</button>{unit}</th>'
    )


def _entry(figure: Figure, index: int) -> str:
    marks = "~" * figure.ties + "*" * figure.best + "!" * figure.drifts
    kind = "best" if figure.best else "drifts" if figure.drifts or figure.failed else ""
    value = "" if figure.value is None else escape(str(figure.value))
    value = "Infinity" if figure.value == float("inf") else value
    tag, scope = ("th", ' scope="row"') if index == 0 else ("td", "")
    kind = f' class="{kind}"' if kind else ""
    shown = _cut(figure.text) if index == 0 else escape(figure.text)
    return f'<{tag}{scope}{kind} data-value="{value}">{shown}{marks}</{tag}>'


def _cut(name: str) -> str:
    """A name that a narrow screen may break where an option begins."""
    return escape(name).replace(":", ":<wbr>").replace(",", ",<wbr>")


def _titled(title: str, lines: Sequence[str]) -> str:
    return f"<h3>{escape(title)}</h3>{_items(lines)}" if lines else ""


def _items(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _failures(found: Rows) -> str:
    items = "".join(
        f"<dt>{_cut(one.name)}: {escape(one.status)}</dt><dd>{escape(one.reason)}</dd>"
        for one in found.failures
    )
    return f"<dl>{items}</dl>" if items else ""


def _environment(result: BenchResult) -> str:
    machine, job = result.machine, result.job
    pythons = dict.fromkeys(cell.environment for cell in result.cells if cell.environment)
    threads = {rank.threads for c in result.cells for t in c.trials for rank in t.ranks}
    lines = [
        ("processor", f"{machine.processor}, {machine.cores} cores"),
        ("memory", text.size(machine.memory)),
        ("accelerators", ", ".join(machine.accelerators) or "none"),
        ("system", machine.system),
        *machine.versions.items(),
        ("Python environments", ", ".join(pythons)),
        ("threads of a rank", ", ".join(map(str, sorted(threads)))),
        ("peak in a matrix product", _matmul(result)),
        ("FLOPs of a step", f"{job.flops:.4g}" if job.flops else "not counted"),
        ("seed", str(job.seed)),
        ("commit", job.commit),
        ("begun", machine.date),
    ]
    return _words([line for line in lines if line[1]])


def _matmul(result: BenchResult) -> str:
    return "; ".join(
        f"{flops / 1e9:,.4g} GFLOP/s in {precision} on {text.devices(one.devices)}"
        for one in result.interconnect
        for precision, flops in one.matmul_flops.items()
    )


def _words(lines: Iterable[tuple[str, str]]) -> str:
    body = "".join(
        f'<tr><th scope="row">{escape(what)}</th><td>{escape(which)}</td></tr>'
        for what, which in lines
    )
    return f'<table class="words"><tbody>{body}</tbody></table>'
