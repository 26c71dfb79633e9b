"""The charts of a report, in the order of the page. They need plotly, and import it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unipar.benchmark.report.charts import communication, growth, losses, memory, speed
from unipar.benchmark.report.charts.drawing import Chart, Missing
from unipar.benchmark.result import BenchResult


@dataclass(frozen=True)
class Entry:
    """One chart of the page.

    Attributes:
        key: its name in the page.
        title: its heading.
        draw: makes it, or says why there is none.
    """

    key: str
    title: str
    draw: Callable[[BenchResult], Chart | Missing]


CHARTS = (
    Entry("throughput", "Throughput", speed.throughput),
    Entry("step-times", "Step times", speed.step_times),
    Entry("speedup", "Speed-up", growth.speedup),
    Entry("efficiency", "Efficiency", growth.efficiency),
    Entry("model", "Step time beside a model of the interconnect", growth.modelled),
    Entry("memory-by-kind", "Memory by kind", memory.by_kind),
    Entry("memory-by-rank", "Memory by rank", memory.by_rank),
    Entry("collectives", "Collectives", communication.counts),
    Entry("traffic", "Bytes communicated", communication.volumes),
    Entry("exposure", "Time communicated", communication.exposure),
    Entry("all-reduce", "Interconnect", communication.sweep),
    Entry("losses", "Losses", losses.curves),
    Entry("loss-differences", "Loss differences", losses.differences),
)
