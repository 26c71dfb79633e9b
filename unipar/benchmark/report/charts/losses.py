"""The losses of all, which should be the same."""

from __future__ import annotations

from plotly import graph_objects as go

from unipar.benchmark.report import text
from unipar.benchmark.report.charts import drawing
from unipar.benchmark.report.charts.drawing import Chart, Look, Missing
from unipar.benchmark.result import BenchResult, CellResult


def curves(result: BenchResult) -> Chart | Missing:
    """Every cell's loss, laid over each other."""
    cells = _cells(result)
    if not cells:
        return Missing("no loss was recorded.")
    figure = drawing.frame(x="step", y="loss")
    for cell in cells:
        losses = cell.trials[0].losses
        _line(figure, result, cell, list(range(1, len(losses) + 1)), list(losses), "%{y:.5f}")
    ends = [cell.trials[0].losses[-1] for cell in cells]
    return Chart(
        figure,
        f"Loss by step of {drawing.shapes(len(cells))}, laid over each other. The last is between "
        f"{min(ends):.5g} and {max(ends):.5g}.",
    )


def differences(result: BenchResult) -> Chart | Missing:
    """How far each loss is from the reference's, relatively."""
    cells = [cell for cell in _cells(result) if cell.parity]
    found = [(cell, reference) for cell in cells if (reference := _reference(result, cell))]
    if not found:
        return Missing("there is no reference to compare a loss with.")
    figure = drawing.frame(x="step", y="relative difference")
    equal, drawn = [], 0
    for cell, reference in found:
        pairs = zip(cell.trials[0].losses, reference, strict=False)
        apart = [abs(a - b) / abs(b) if b else 0.0 for a, b in pairs]
        # A logarithmic axis has no place for steps that are equal to the last bit.
        points = [(step, value) for step, value in enumerate(apart, start=1) if value > 0]
        if not points:
            equal.append(drawing.name(cell.cell))
            continue
        drawn += 1
        x, y = [step for step, _ in points], [value for _, value in points]
        _line(figure, result, cell, x, y, "%{y:.1e}")
    if not drawn:
        return Missing("every loss equals its reference's in every bit.")
    parities = [cell.parity for cell in cells if cell.parity]
    allowed, steps = max(one.allowed for one in parities), len(cells[0].trials[0].losses)
    if allowed > 0:
        figure.add_scatter(
            name="largest that rounding explains",
            mode="lines",
            x=[1, steps],
            y=[allowed, allowed],
            line={"color": drawing.GREY, "dash": "dot", "width": 1.75},
            hovertemplate="allowed: %{y:.1e}<extra></extra>",
        )
    figure.update_yaxes(type="log", exponentformat="power", dtick=1)
    worst = max(cells, key=lambda cell: cell.parity.difference if cell.parity else 0.0)
    assert worst.parity
    drifting = [drawing.name(cell.cell) for cell in cells if cell.parity and cell.parity.drifts]
    alt = (
        f"Relative difference of each loss from that of {worst.parity.reference}. The largest is "
        f"{text.difference(worst.parity.difference)}, of {drawing.name(worst.cell)}; "
        + (f"{text.join(drifting)} drift." if len(drifting) > 1 else "")
        + (f"{drifting[0]} drifts." if len(drifting) == 1 else "")
        + ("" if drifting else "none drifts.")
    )
    if equal:
        alt += f" Equal in every bit, and so not drawn: {text.join(equal)}."
    return Chart(figure, alt)


def _line(
    figure: go.Figure,
    result: BenchResult,
    cell: CellResult,
    x: list[int],
    y: list[float],
    hover: str,
) -> None:
    label = drawing.plain(drawing.name(cell.cell))
    labels = list(dict.fromkeys(one.cell.label for one in result.cells))
    counts = sorted({one.cell.devices for one in result.cells})
    look = Look.of(labels.index(cell.cell.label), dash=counts.index(cell.cell.devices))
    figure.add_scatter(
        name=label,
        mode="lines+markers",
        x=x,
        y=y,
        line={"color": look.color, "dash": look.dash, "width": 1.75},
        marker={"symbol": look.mark, "size": 6, "maxdisplayed": 8},
        hovertemplate=f"{label}: {hover}<extra></extra>",
    )


def _cells(result: BenchResult) -> list[CellResult]:
    return [cell for cell in result.measured if cell.trials and cell.trials[0].losses]


def _reference(result: BenchResult, cell: CellResult) -> list[float]:
    """The losses that a cell's are compared with; empty where they were not kept."""
    assert cell.parity
    label = cell.parity.reference
    named = [one for one in _cells(result) if one.cell.label == label]
    least = min(named, key=lambda one: one.cell.devices, default=None)
    return result.reference_losses.get(label) or (least.trials[0].losses if least else [])
