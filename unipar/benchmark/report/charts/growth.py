"""The gain of more devices, beside Amdahl's law and a model of the interconnect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plotly import graph_objects as go

from unipar.benchmark.report import text
from unipar.benchmark.report.charts import drawing
from unipar.benchmark.report.charts.drawing import Chart, Look, Missing
from unipar.benchmark.result import BenchResult, Scaling

_ALONE = "no strategy was measured on several numbers of devices."
_POINTS = 40


def speedup(result: BenchResult) -> Chart | Missing:
    """Speed beside one device, with Amdahl's fit through it."""
    if not result.scaling:
        return Missing(_ALONE)
    figure = drawing.frame(x="devices", y="times the speed of 1 device")
    most = _most(result)
    figure.add_scatter(
        name="ideal", mode="lines", x=[1, most], y=[1, most], line=_line(drawing.GREY, "dot")
    )
    _draw(figure, result, lambda one: one.speedup, amdahl, "%{y:.2f} times")
    best = max(result.scaling, key=lambda one: one.speedup[-1])
    return Chart(
        figure,
        "Speed-up by number of devices; points are measured, and lines are Amdahl's law with the "
        f"serial fraction that fits best. {_gain(best)}.",
    )


def efficiency(result: BenchResult) -> Chart | Missing:
    """Speed-up by device."""
    if not result.scaling:
        return Missing(_ALONE)
    figure = drawing.frame(x="devices", y="efficiency (%)")
    most = _most(result)
    figure.add_scatter(
        name="ideal", mode="lines", x=[1, most], y=[100, 100], line=_line(drawing.GREY, "dot")
    )
    _draw(
        figure,
        result,
        lambda one: [100 * value for value in one.efficiency],
        lambda serial, count: 100 * amdahl(serial, count) / count,
        "%{y:.1f} %",
    )
    figure.update_yaxes(rangemode="tozero")
    told = ", ".join(f"{one.label} {one.efficiency[-1]:.0%}" for one in result.scaling)
    return Chart(
        figure,
        f"Speed-up divided by the number of devices, with Amdahl's law as lines. On the most "
        f"devices: {told}.",
    )


def modelled(result: BenchResult) -> Chart | Missing:
    """Step time, and ``T1 / N + calls * alpha + beta * bytes`` beside it."""
    known = [one for one in result.scaling if any(value is not None for value in one.modelled)]
    if not known:
        return Missing(
            _ALONE if not result.scaling else "the traffic of a step, which it needs, is not known."
        )
    unit = text.unit_of_seconds(seconds for one in known for seconds in one.seconds)
    figure = drawing.frame(x="devices", y=f"step time ({unit.name})")
    looks = drawing.looks(result)
    errors: list[tuple[float, Scaling, int]] = []
    for one in known:
        look = looks.get(one.label, Look.of(0))
        pairs = list(zip(one.devices, one.seconds, one.modelled, strict=True))
        fitted = [(count, value) for count, _, value in pairs if value is not None]
        figure.add_scatter(
            name=drawing.plain(one.label),
            legendgroup=one.label,
            mode="markers",
            x=one.devices,
            y=[seconds / unit.size for seconds in one.seconds],
            marker={"color": look.color, "symbol": look.mark, "size": 10},
        )
        figure.add_scatter(
            name="modeled",
            legendgroup=one.label,
            mode="lines",
            x=[count for count, _ in fitted],
            y=[value / unit.size for _, value in fitted],
            line=_line(look.color, look.dash),
        )
        errors += [
            (abs(value / seconds - 1), one, count)
            for count, seconds, value in pairs
            if value is not None
        ]
    drawing.device_axis(figure, [count for one in known for count in one.devices])
    figure.update_yaxes(rangemode="tozero")
    error, one, count = max(errors, key=lambda item: item[0])
    return Chart(
        figure,
        "Step time by number of devices: points are measured, and lines are what one device's time "
        "divided by their number gives, with the interconnect's latency for each collective and "
        f"its time for each byte added. It is furthest from {one.label} {drawing.on(count)}, by "
        f"{error:.0%}.",
    )


def amdahl(serial: float, count: float) -> float:
    """The speed-up of Amdahl's law."""
    return 1 / (serial + (1 - serial) / count)


def _draw(
    figure: go.Figure,
    result: BenchResult,
    values: Callable[[Scaling], list[float]],
    law: Callable[[float, float], float],
    hover: str,
) -> None:
    looks = drawing.looks(result)
    for one in result.scaling:
        look = looks.get(one.label, Look.of(0))
        figure.add_scatter(
            name=drawing.plain(one.label),
            legendgroup=one.label,
            mode="markers",
            x=one.devices,
            y=values(one),
            marker={"color": look.color, "symbol": look.mark, "size": 10},
            hovertemplate=f"{drawing.plain(one.label)} on %{{x}}: {hover}<extra></extra>",
        )
        if one.serial_fraction is None:
            continue
        span = max(one.devices) - 1
        counts = [1 + span * place / (_POINTS - 1) for place in range(_POINTS)]
        figure.add_scatter(
            name=f"Amdahl, {_serial(one.serial_fraction)}",
            legendgroup=one.label,
            mode="lines",
            x=counts,
            y=[law(one.serial_fraction, count) for count in counts],
            line=_line(look.color, look.dash),
            hoverinfo="skip",
        )
    drawing.device_axis(figure, [count for one in result.scaling for count in one.devices])


def _gain(best: Scaling) -> str:
    gain = f"{best.speedup[-1]:.2f} times {drawing.on(best.devices[-1])}"
    if best.speedup[-1] <= 1:
        return f"None gains: {best.label} loses least, with {gain}"
    fitted = "" if best.serial_fraction is None else f" ({_serial(best.serial_fraction)})"
    return f"{best.label} gains most, {gain}{fitted}"


def _serial(fraction: float) -> str:
    # The law knows of no loss: beyond 1 the fit says nothing of the job.
    return f"serial {fraction:.1%}" if fraction <= 1 else "no gain"


def _most(result: BenchResult) -> int:
    return max(count for one in result.scaling for count in one.devices)


def _line(color: str, dash: str) -> dict[str, Any]:
    return {"color": color, "dash": dash, "width": 1.75}
