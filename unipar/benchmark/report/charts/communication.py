"""Collectives of a step, and what one costs between these processes."""

from __future__ import annotations

from collections.abc import Callable

from plotly import graph_objects as go

from unipar.benchmark.records import Overlap, Traffic
from unipar.benchmark.report import text
from unipar.benchmark.report.charts import drawing
from unipar.benchmark.report.charts.drawing import Chart, Look, Missing
from unipar.benchmark.result import BenchResult, CellResult

_UNKNOWN = "no collective was recorded."


def counts(result: BenchResult) -> Chart | Missing:
    """How many collectives of each kind."""
    cells = _cells(result)
    if not cells:
        return Missing(_UNKNOWN)
    figure = _draw(cells, "collectives per step", "%{x}", lambda one: float(one.count))
    most = max(cells, key=lambda cell: sum(one.count for one in _traffic(cell)))
    calls = sum(one.count for one in _traffic(most))
    told = f"{drawing.name(most.cell)} makes the most, {calls}"
    return Chart(figure, f"Collectives that one rank makes in a step, by kind. {told}.")


def volumes(result: BenchResult) -> Chart | Missing:
    """How many bytes of each kind."""
    cells = _cells(result)
    if not cells:
        return Missing(_UNKNOWN)
    totals = [sum(one.bytes for one in _traffic(cell)) for cell in cells]
    unit = text.unit_of_bytes(totals)
    figure = _draw(
        cells,
        f"{unit.name} per step",
        f"%{{x:,.4s}} {unit.name}",
        lambda one: one.bytes / unit.size,
    )
    most, least = max(totals), min(totals)
    told = f"{drawing.name(cells[totals.index(most)].cell)} moves most, {text.size(most)}"
    if least < most:
        told += f"; {drawing.name(cells[totals.index(least)].cell)} least, {text.size(least)}"
    return Chart(
        figure, f"Bytes of the tensors that collectives work on in a step, by kind. {told}."
    )


def exposure(result: BenchResult) -> Chart | Missing:
    """How long a step communicates, beside computation and without it."""
    cells = [cell for cell in _by_devices(result) if _overlap(cell)]
    found = [one for one in map(_overlap, cells) if one]
    if not found:
        return Missing("the profiler saw no collective, as with one device.")
    unit = text.unit_of_seconds([one.communication for one in found])
    figure = _bars(cells, f"{unit.name} of a profiled step")
    hidden = [one.communication - one.exposed for one in found]
    for place, (name, values) in enumerate(
        (("exposed", [one.exposed for one in found]), ("hidden behind computation", hidden))
    ):
        figure.add_bar(
            name=name,
            orientation="h",
            y=list(range(len(cells))),
            x=[value / unit.size for value in values],
            marker=drawing.fill(Look.of(place)),
            hovertemplate=f"{name}: %{{x:,.4s}} {unit.name}<extra></extra>",
        )
    parts = [one.exposed / one.communication for one in found]
    most, least = parts.index(max(parts)), parts.index(min(parts))
    told = f"{drawing.name(cells[most].cell)} exposes most of it, {parts[most]:.0%}"
    if most != least:
        told += f"; {drawing.name(cells[least].cell)} least, {parts[least]:.0%}"
    return Chart(
        figure, f"Time in which a collective is under way, and what is computed beside it. {told}."
    )


def sweep(result: BenchResult) -> Chart | Missing:
    """Time of one all-reduce by its size, with the fitted latency and bandwidth."""
    measured = [one for one in result.interconnect if one.points]
    if not measured:
        return Missing("the interconnect was not measured, as with one device.")
    figure = drawing.frame(x="bytes of the tensor", y="seconds")
    told = []
    for place, one in enumerate(measured):
        look, label = Look.of(place), text.devices(one.devices)
        sizes = [size for size, _ in one.points]
        figure.add_scatter(
            name=label,
            legendgroup=label,
            mode="markers",
            x=sizes,
            y=[seconds for _, seconds in one.points],
            marker={"color": look.color, "symbol": look.mark, "size": 9},
            hovertemplate="%{x:.3s}B: %{y:.3s}s<extra></extra>",
        )
        figure.add_scatter(
            name="fit",
            legendgroup=label,
            mode="lines",
            x=sizes,
            y=[one.alpha + one.beta * size for size in sizes],
            line={"color": look.color, "dash": look.dash, "width": 1.75},
            hoverinfo="skip",
        )
        rate = f", {text.size(1 / one.beta)}/s" if one.beta > 0 else ""
        told.append(f"{label}: {text.seconds(one.alpha)} latency{rate}")
    figure.update_xaxes(type="log", exponentformat="SI", ticksuffix="B", minexponent=0, dtick=1)
    figure.update_yaxes(type="log", exponentformat="SI", ticksuffix="s", minexponent=0, dtick=1)
    return Chart(
        figure,
        "Time of an all-reduce by its size; points are measured, and lines are a fitted latency "
        f"plus a time for each byte. {'; '.join(told)}.",
    )


def _draw(
    cells: list[CellResult], title: str, hover: str, value: Callable[[Traffic], float]
) -> go.Figure:
    kinds = list(dict.fromkeys(one.kind for cell in cells for one in _traffic(cell)))
    figure = _bars(cells, title)
    for place, kind in enumerate(kinds):
        look = Look.of(place)
        figure.add_bar(
            name=drawing.plain(kind),
            orientation="h",
            y=list(range(len(cells))),
            x=[sum(value(one) for one in _traffic(cell) if one.kind == kind) for cell in cells],
            marker=drawing.fill(look),
            hovertemplate=f"{drawing.plain(kind)}: {hover}<extra></extra>",
        )
    return figure


def _bars(cells: list[CellResult], title: str) -> go.Figure:
    figure = drawing.rows([drawing.name(cell.cell) for cell in cells], x=title)
    figure.update_layout(barmode="stack", bargap=0.25)
    return figure


def _cells(result: BenchResult) -> list[CellResult]:
    return [cell for cell in _by_devices(result) if _traffic(cell)]


def _by_devices(result: BenchResult) -> list[CellResult]:
    return sorted(result.cells, key=lambda cell: cell.cell.devices)


def _overlap(cell: CellResult) -> Overlap | None:
    """Of the first rank of the first repeat."""
    return cell.trials[0].ranks[0].overlap if cell.trials and cell.trials[0].ranks else None


def _traffic(cell: CellResult) -> list[Traffic]:
    """Of the first rank of the first repeat."""
    first = cell.trials[0].ranks[0] if cell.trials and cell.trials[0].ranks else None
    return (first.traffic or []) if first else []
