"""The tables of what faces cost beside their frameworks, as ``make bench-faces`` measured it."""

from __future__ import annotations

import json
from pathlib import Path

from measure.report import Row
from unipar.benchmark.statistics import Estimate

FIGURES = Path(__file__).resolve().parents[2] / "docs" / "migrate" / "faces.json"
NOTHING = "It has not been measured yet."
METHOD = (
    "Both read their batches from a `DataLoader`, and never look at the loss. They take turns, a "
    "few steps at a time, in processes of their own, which are started again in each of several "
    "rounds; a ratio is of the medians of a round, and what is given is the median over rounds. "
    "On one process time is the processor's, so that other programs count for less; on more it is "
    "the clock's, of the slowest rank, and the processor's, the mean of ranks, where a row says "
    "so. A step of a tiny perceptron takes a millisecond or a few: it shows every call that is "
    "made, and no aim is set for it. `make bench-faces` writes this table."
)
"""How a face and its framework are compared, for every page."""


def speed(page: str) -> tuple[str, list[str], list[list[str]]] | None:
    """When and where, and a row for each program and number of processes.

    Args:
        page: of docs/migrate, by its name.

    Returns:
        ``None`` where nothing has been measured.
    """
    if not FIGURES.exists():
        return None
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    face = figures["faces"].get(page)
    if face is None:
        return None
    busy = "" if figures["others"] is None else (
        f" Other processes had {figures['others']:.0%} of the cores meanwhile."
    )  # fmt: skip
    rows = []
    for values in face["rows"]:
        row = Row(**(values | {"ratio": Estimate.model_validate(values["ratio"])}))
        ratio = row.ratio
        spread = f"{ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f})"
        verdict = "" if row.aim is None else f"{row.wanted}: {row.verdict}"
        rows.append([row.what, row.baseline, row.ours, spread, str(ratio.pairs), verdict])
    heads = ["a step", "the framework", "beside it", "ratio (95 % interval)", "pairs", "aim"]
    return f"{figures['about']} {face['framework']}.{busy}", heads, rows
