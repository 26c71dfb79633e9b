"""How fast, and how evenly."""

from __future__ import annotations

from plotly import graph_objects as go

from unipar.benchmark.recommend import drifts
from unipar.benchmark.report import text
from unipar.benchmark.report.charts import drawing
from unipar.benchmark.report.charts.drawing import Chart, Look, Missing
from unipar.benchmark.result import BenchResult, CellResult
from unipar.benchmark.rounds import slowest


def throughput(result: BenchResult) -> Chart | Missing:
    """Items a second, all ranks together, with the spread over the repeats."""
    # A hand-written loop says nothing of items.
    cells = [cell for cell in result.measured if not cell.cell.raw]
    if not cells:
        return Missing("no cell was measured.")
    labels = list(dict.fromkeys(cell.cell.label for cell in cells))
    counts = sorted({cell.cell.devices for cell in cells})
    figure = drawing.rows(labels, x="items per second", each=0.4 + 0.8 * len(counts))
    for place, count in enumerate(counts):
        look = Look.of(place)
        found = [
            (cell.cell.label, cell.items_per_second)
            for cell in cells
            if cell.cell.devices == count and cell.items_per_second
        ]
        figure.add_bar(
            name=text.devices(count),
            orientation="h",
            y=[labels.index(label) for label, _ in found],
            x=[speed.median for _, speed in found],
            error_x={
                "type": "data",
                "symmetric": False,
                "array": [speed.p95 - speed.median for _, speed in found],
                "arrayminus": [speed.median - speed.p5 for _, speed in found],
                "thickness": 1.5,
                "width": 4,
                "color": drawing.GREY,
            },
            marker=drawing.fill(look),
            customdata=[drawing.plain(label) for label, _ in found],
            hovertemplate=f"%{{customdata}} on {count}: %{{x:,.4s}} items/s<extra></extra>",
        )
    figure.update_layout(barmode="group", bargap=0.25)
    told = f"The longest bar is that of {_told(cells[0])}"
    if len(cells) > 1:
        told += f", the shortest that of {_told(cells[-1])}"
    return Chart(
        figure,
        f"Throughput by strategy and number of devices. {told}. Error bars go from the 5th to the "
        "95th percentile of the repeats.",
    )


def step_times(result: BenchResult) -> Chart | Missing:
    """The distribution of the slowest rank's steps."""
    cells = [cell for cell in result.measured if cell.trials and cell.step_seconds]
    if not cells:
        return Missing("no step was timed.")
    unit = text.unit_of_seconds(cell.step_seconds.median for cell in cells if cell.step_seconds)
    looks = drawing.looks(result)
    figure = drawing.rows([drawing.name(cell.cell) for cell in cells], x=f"step time ({unit.name})")
    for place, cell in enumerate(cells):
        times = _times(cell)
        figure.add_trace(
            go.Box(
                x=[seconds / unit.size for seconds in times],
                y=[place] * len(times),
                name=drawing.plain(drawing.name(cell.cell)),
                orientation="h",
                width=0.7,
                boxpoints="outliers",
                marker={"color": looks[cell.cell.label].color, "size": 4},
                line={"width": 1.5},
            )
        )
    figure.update_xaxes(rangemode="normal")
    most = max(cells, key=lambda cell: cell.step_seconds.relative if cell.step_seconds else 0.0)
    assert most.step_seconds
    return Chart(
        figure,
        f"Times of {len(_times(cells[0]))} steps of the slowest rank for each of "
        f"{drawing.shapes(len(cells))}: quartiles, whiskers, and what lies beyond them. The least "
        f"even is {drawing.name(most.cell)}, whose 5th and 95th percentiles are "
        f"{most.step_seconds.relative:.0%} of its median apart.",
    )


def _times(cell: CellResult) -> list[float]:
    return [seconds for trial in cell.trials for seconds in slowest(trial)]


def _told(cell: CellResult) -> str:
    assert cell.items_per_second
    wrong = ", whose loss drifts" if drifts(cell) else ""
    return (
        f"{drawing.name(cell.cell)} with {text.number(cell.items_per_second.median)} items/s{wrong}"
    )
