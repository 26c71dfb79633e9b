"""The end of a run: a table of figures, and where its files are."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from unipar.callbacks.records import RunInfo, RunResult
from unipar.callbacks.text import count, duration, memory


def summary(run: RunInfo, result: RunResult) -> Table:
    """Sum up a finished run, as a table of two columns."""
    table = Table(title="run finished", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    # As a Text: a console that the user gave would take :bug: in a string for an emoji.
    table.add_row("strategy", Text(run.strategy))
    table.add_row("world size", f"{run.world_size} x {run.device}")
    if result.history:
        last = result.history[-1]
        table.add_row("steps", f"{last.step:,}")
        table.add_row("final loss", f"{last.loss:.4f}")
    if result.evaluations:
        step, metrics = result.evaluations[-1]
        for name, value in metrics.items():
            table.add_row(Text(f"evaluation {name}"), f"{value:.4g} (step {step:,})")
    table.add_row("items/s", count(result.items_per_second))
    table.add_row("peak memory per rank", _by_rank(result.peak_memory))
    table.add_row("wall time", duration(result.wall_time))
    return table


def places(result: RunResult) -> list[str]:
    """Where the run's files are; a line each, so that a path can be copied whole."""
    checkpoint = _short(result.checkpoint) if result.checkpoint else "none"
    return [f"checkpoint  {checkpoint}", f"output      {_short(result.output_dir)}"]


def _by_rank(peaks: list[int]) -> str:
    if len(peaks) <= 8:
        return ", ".join(memory(peak) for peak in peaks)
    return f"{memory(min(peaks))} to {memory(max(peaks))} over {len(peaks)} ranks"


def _short(path: Path) -> str:
    """``path`` from the current directory where it is below it, so that it fits on a line."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
