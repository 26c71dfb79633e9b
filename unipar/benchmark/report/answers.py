"""The answers that a reader wants first, a line for each question."""

from __future__ import annotations

from collections.abc import Sequence

from unipar.benchmark.recommend import Judgement, apart_by, drifts, judge, measured, name, peak
from unipar.benchmark.report import text
from unipar.benchmark.result import BenchResult, CellResult
from unipar.benchmark.statistics import LEAST


def of(result: BenchResult) -> list[tuple[str, str]]:
    """Question and answer: what is fastest, what holds least, what is wrong, how noisy it was."""
    cells = measured(result.cells)
    if not cells:
        return []
    right = [cell for cell in cells if not drifts(cell)]
    found = [
        ("Fastest", _fastest(judge(result.cells, result.scaling), result.item)),
        ("Least memory", _smallest(right)),
        ("Wrong", _wrong(cells)),
        ("Failed", _failed(result.cells)),
        ("Noise", _noise(cells)),
    ]
    return [(question, answer) for question, answer in found if answer]


def incomplete(result: BenchResult) -> str:
    """That it ended before all was run, and how far it came; empty where it did not."""
    if not result.interrupted:
        return ""
    done = sum(len(cell.trials) for cell in result.cells)
    whole = result.job.repeats * len(result.cells)
    return (
        f"Not complete: {result.interrupted} after {done} of {whole} trials. "
        "The same command goes on where it ended."
    )


def _fastest(found: Judgement, item: str) -> str:
    if found.fastest is None:
        return "none: every loss drifts"
    if found.winner is None:
        among = [name(cell) for cell in (found.fastest, *found.equals)]
        named = f": {text.join(among)}" if found.call == "too close" else ""
        return f"{found.call} to call{named}"
    speed = found.winner.items_per_second
    assert speed
    return f"{name(found.winner)}, {text.number(speed.median)} {item}s/s"


def _smallest(right: Sequence[CellResult]) -> str:
    held = {name(cell): size for cell in right if (size := peak(cell)) is not None}
    if not held:
        return ""
    least = min(held.values())
    among = [cell for cell, size in held.items() if size <= least * (1 + LEAST)]
    return f"{text.join(among)}, {text.size(least)} on the fullest rank"


def _wrong(cells: Sequence[CellResult]) -> str:
    wrong = [f"{name(cell)} (by {apart_by(cell)})" for cell in cells if drifts(cell)]
    if wrong:
        return text.join(wrong)
    return "none" if any(cell.parity for cell in cells) else "not known: nothing to compare with"


def _failed(cells: Sequence[CellResult]) -> str:
    fine = ("measured", "refused")
    failed = [f"{name(cell)} ({cell.status})" for cell in cells if cell.status not in fine]
    return text.join(failed) if failed else ""


def _noise(cells: Sequence[CellResult]) -> str:
    lines = []
    loads = [(cell.load, name(cell)) for cell in cells if cell.load is not None]
    if loads:
        most, where = max(loads)
        lines.append(f"other processes had up to {text.percent(most)} of the cores ({where})")
    spreads = [
        (cell.repeat_seconds.relative, name(cell))
        for cell in cells
        if cell.repeat_seconds and cell.repeat_seconds.count > 1
    ]
    if spreads:
        most, where = max(spreads)
        lines.append(f"repeats spread by up to {text.percent(most)} ({where})")
    return "; ".join(lines)
