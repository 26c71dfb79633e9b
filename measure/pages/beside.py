"""The tables of replicas that are lost and come, beside other systems, as measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parents[2] / "docs" / "reliability"


def changes() -> tuple[list[str], list[list[str]]]:
    """A row for each system: medians over its runs, with the least and the most."""
    rows = []
    for name, runs in _named("changes").items():
        lost, gained = ([run[kind] for run in runs] for kind in ("lost", "gained"))
        repeated = max(one["repeated"] for one in lost), max(one["repeated"] for one in gained)
        apart = max(run["apart"] for run in runs)
        cells = [_spread([one["seconds"] for one in kind], _seconds) for kind in (lost, gained)]
        rows.append([name, *cells, " and ".join(map(str, repeated)), f"{apart:.1e}"])
    heads = ["system", "one is killed", "one comes", "steps repeated then, at most"]
    return [*heads, "losses apart at most"], rows


def prices() -> tuple[list[str], list[list[str]]]:
    """A row for each system: medians over its runs of what a step takes."""
    rows = []
    for name, runs in _named("prices").items():
        times = ([run[kind] for run in runs] for kind in ("seconds", "cpu"))
        rows.append([name, *(_spread(kind, _milliseconds) for kind in times)])
    return ["system", "from step to step", "of a core, by rank 0"], rows


def about() -> str:
    """The commands, and what was the same for all of them once."""
    commands: dict[str, list[str]] = {}
    for part in _parts():
        command, circumstances = part["about"].split(". ", 1)
        commands.setdefault(circumstances, []).append(command)
    return "\n\n".join(f"{'; '.join(found)}. {same}" for same, found in commands.items())


def _parts() -> list[dict[str, Any]]:
    return json.loads((HERE / "beside.json").read_text())["parts"]


def _named(kind: str) -> dict[str, list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    # The newest part has its rows in the order in which they were measured.
    for part in reversed(_parts()):
        for run in part[kind]:
            groups.setdefault(run["name"], []).append(run)
    return groups


def _spread(values: list[float], unit: Callable[[float], str]) -> str:
    least, most = unit(min(values)), unit(max(values))
    return least if least == most else f"{unit(median(values))} ({least} to {most})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds else "none"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms"
