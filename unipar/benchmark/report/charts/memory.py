"""The memory of a rank, by kind, beside what the formulas give."""

from __future__ import annotations

from collections.abc import Sequence

from unipar.benchmark.records import KINDS, Memory
from unipar.benchmark.report import text
from unipar.benchmark.report.charts import drawing
from unipar.benchmark.report.charts.drawing import Chart, Look, Missing
from unipar.benchmark.result import BenchResult, CellResult

_NAMES = {"optimizer": "optimizer state", "other": "buckets and buffers"}
_UNKNOWN = "no cell's memory was measured."


def by_kind(result: BenchResult) -> Chart | Missing:
    """The fullest rank of each cell, and the formulas' prediction for it."""
    fullest = [
        (cell, max(memories, key=lambda memory: memory.tensors))
        for cell in _by_shape(result)
        if (memories := _ranks(cell))
    ]
    if not fullest:
        return Missing(_UNKNOWN)
    lines: list[tuple[str, Memory, bool]] = []
    for cell, memory in fullest:
        lines.append((drawing.name(cell.cell), memory, True))
        if cell.predicted:
            lines.append(("by formula", cell.predicted, False))
    most, held = max(fullest, key=lambda pair: pair[1].tensors)
    least, little = min(fullest, key=lambda pair: pair[1].tensors)
    told = f"{drawing.name(most.cell)} holds most, {text.size(held.tensors)} in tensors"
    if little.tensors < held.tensors:
        told += f"; {drawing.name(least.cell)} least, {text.size(little.tensors)}"
    if any(memory.activations is None for _, memory in fullest):
        told += "; activations that are recomputed selectively are not counted"
    return _draw(
        lines,
        f"Bytes of the fullest rank by kind, and below each what the formulas give. {told}. "
        "A diamond is the most that the rank held beyond what it held before there was a model.",
    )


def by_rank(result: BenchResult) -> Chart | Missing:
    """Every rank, on the most devices."""
    cells = [cell for cell in _by_shape(result) if _ranks(cell)]
    if not cells:
        return Missing(_UNKNOWN)
    count = max(cell.cell.devices for cell in cells)
    if count == 1:
        return Missing("no cell with several ranks was measured.")
    chosen = [cell for cell in cells if cell.cell.devices == count]
    lines = [
        (f"{cell.cell.label} rank {rank}", memory, True)
        for cell in chosen
        for rank, memory in enumerate(_ranks(cell))
    ]
    uneven = max(chosen, key=_unevenness)
    return _draw(
        lines,
        f"Bytes of every rank by kind {drawing.on(count)}. The least even is "
        f"{uneven.cell.label}, whose fullest rank holds {_unevenness(uneven):.1%} more than its "
        f"emptiest.",
    )


def _draw(lines: Sequence[tuple[str, Memory, bool]], alt: str) -> Chart:
    unit = text.unit_of_bytes(memory.tensors for _, memory, _ in lines)
    figure = drawing.rows([label for label, _, _ in lines], x=unit.name)
    for place, kind in enumerate(KINDS):
        look = Look.of(place)
        figure.add_bar(
            name=_NAMES.get(kind, kind),
            orientation="h",
            y=list(range(len(lines))),
            x=[(getattr(memory, kind) or 0) / unit.size for _, memory, _ in lines],
            marker={
                **drawing.fill(look),
                "opacity": [1.0 if measured else 0.55 for _, _, measured in lines],
            },
            hovertemplate=f"{_NAMES.get(kind, kind)}: %{{x:,.4s}} {unit.name}<extra></extra>",
        )
    peaks = [
        (place, (memory.peak - memory.resident) / unit.size)
        for place, (_, memory, measured) in enumerate(lines)
        if measured
    ]
    figure.add_scatter(
        name="peak of the rank",
        mode="markers",
        y=[place for place, _ in peaks],
        x=[value for _, value in peaks],
        marker={"color": drawing.GREY, "symbol": "diamond", "size": 8},
        hovertemplate=f"peak: %{{x:,.4s}} {unit.name}<extra></extra>",
    )
    figure.update_layout(barmode="stack", bargap=0.2)
    return Chart(figure, alt)


def _by_shape(result: BenchResult) -> list[CellResult]:
    """Measured cells as they were asked for, by number of devices."""
    measured = [cell for cell in result.cells if cell.status == "measured"]
    return sorted(measured, key=lambda cell: cell.cell.devices)


def _ranks(cell: CellResult) -> list[Memory]:
    """Of the first repeat: the others hold the same."""
    if not cell.trials:
        return []
    return [rank.memory for rank in cell.trials[0].ranks if rank.memory]


def _unevenness(cell: CellResult) -> float:
    held = [memory.tensors for memory in _ranks(cell)]
    return max(held) / min(held) - 1 if min(held) else 0.0
