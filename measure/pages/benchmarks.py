"""What ``make compare`` has measured, as pages show it."""

from __future__ import annotations

from pathlib import Path

from unipar.benchmark.report import table
from unipar.benchmark.result import BenchResult

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
AIM = 1.02


def about(name: str) -> str:
    """When, where and how."""
    result = BenchResult.load(RESULTS / name)
    machine, shape = result.machine, result.job
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    return (
        f"{shape.model} of {shape.parameters:,} parameters, {shape.global_batch_size} samples a "
        f"step; {shape.steps} timed steps, {shape.repeats} repeats. {machine.date[:10]}, "
        f"`{shape.command}`. {machine.processor}, {machine.cores} cores, "
        f"{machine.memory / 2**30:.0f} GiB, {machine.system}; {versions}."
    )


def compared(name: str) -> str:
    """The table, what failed, and what to pick."""
    return table.markdown(BenchResult.load(RESULTS / name))


def by_hand(name: str) -> tuple[list[str], list[list[str]]]:
    """What unipar costs beside a loop written by hand, and whether that meets the aim."""
    rows = []
    for one in BenchResult.load(RESULTS / name).overhead:
        ratio = one.ratio
        met = "met" if ratio.median <= AIM else "missed"
        within = ", within the spread" if ratio.low <= AIM < ratio.high else ""
        rows.append(
            [
                *(f"`{one.label}`", str(one.devices), f"{ratio.median:.3f}"),
                *(f"{ratio.low:.3f} to {ratio.high:.3f}", f"{met}{within}"),
            ]
        )
    heads = ["strategy", "processes", "step time over the loop's", "95 % interval"]
    return [*heads, f"at most {AIM}"], rows
