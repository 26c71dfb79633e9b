"""The tables of hangs, faults between hosts, kills, and other numbers of ranks, as measured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parents[2] / "docs" / "reliability"
PLACES = {"step": "in a step", "backward": "in backward", "checkpoint": "at a checkpoint"}
HOWS = {"stop": "a rank is stopped", "sleep": "a rank sleeps", "cut": "the link is cut"}
LAUNCHERS = {
    "unipar": "`fit`",
    "torchrun": "`torchrun`",
    "namespaces": "a rank in each of two network namespaces",
}


def load(name: str) -> dict[str, Any]:
    return json.loads((HERE / name).read_text())


def hangs() -> tuple[list[str], list[list[str]]]:
    """A row for each kind of hang, over its strategies."""
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for one in _hangs():
        groups.setdefault((one["place"], one["how"], one["launcher"]), []).append(one)
    rows = []
    for (place, how, launcher), found in groups.items():
        named = sum(one["named"] for one in found)
        strategies = ", ".join(f"`{name}`" for name in dict.fromkeys(f["strategy"] for f in found))
        longest = max(one["timeouts"] for one in found)
        rows.append(
            [
                f"{HOWS[how]} {PLACES[place]}",
                LAUNCHERS[launcher],
                strategies,
                f"{named} of {len(found)}",
                f"{longest:.2f}",
            ]
        )
    return ["what", "started by", "strategies", "named rightly", "longest, in timeouts"], rows


def hangs_summary() -> str:
    found = list(_hangs())
    named = sum(one["named"] for one in found)
    ended = sum(one["timeouts"] <= 2 for one in found)
    lengths = ", ".join(f"{length:g}" for length in sorted({one["timeout"] for one in found}))
    return (
        f"Of {len(found)} hangs {named} were named rightly, and {ended} ended within twice the "
        f"`timeout`, which was {lengths} s."
    )


def about_hangs() -> str:
    parts = load("hangs.json")["parts"]
    return "\n\n".join(
        f"{', '.join(f'`{s}`' for s in dict.fromkeys(h['strategy'] for h in part['hangs']))}: "
        f"{part['about']}"
        for part in parts
    )


def _hangs() -> Iterator[dict[str, Any]]:
    """Each hang, with its time in timeouts."""
    for part in load("hangs.json")["parts"]:
        for one in part["hangs"]:
            yield {
                **one,
                "timeout": part["timeout"],
                "timeouts": one["seconds"] / part["timeout"],
            }


STARTED = {
    "ranks": "a rank on each of {} hosts",
    "torchrun": "`torchrun` on each of {} hosts",
    "fit": '`launcher="torchrun"`, {} hosts',
    "mpi": '`launcher="mpi"`, {} hosts',
}
NUMBERS = {2: "two", 3: "three"}


def faults() -> tuple[list[str], list[list[str]]]:
    """A row for each fault and way of starting, over its strategies."""
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for one in sorted(_faults(), key=lambda one: one["order"]):
        groups.setdefault((one["fault"], one["launcher"], one["hosts"]), []).append(one)
    rows = []
    for (_, launcher, count), found in groups.items():
        right = sum(one["right"] for one in found)
        strategies = ", ".join(f"`{name}`" for name in dict.fromkeys(f["strategy"] for f in found))
        longest = max(one["timeouts"] for one in found)
        rows.append(
            [
                found[0]["what"],
                STARTED[launcher].format(NUMBERS[count]),
                strategies,
                f"{found[0]['ends']}: {right} of {len(found)}",
                f"{longest:.2f}" if found[0]["ends"] == "named" else "",
                str(sum(one["left"] for one in found)),
            ]
        )
    heads = ["what", "started as", "strategies", "how it ended", "longest, in timeouts"]
    return [*heads, "processes left"], rows


def faults_summary() -> str:
    found = list(_faults())
    right = sum(one["right"] for one in found)
    left = sum(one["left"] for one in found)
    lengths = ", ".join(f"{length:g}" for length in sorted({one["timeout"] for one in found}))
    return (
        f"Of {len(found)} runs {right} ended as they have to, and {left} processes were left. "
        f"`timeout` was {lengths} s."
    )


def about_faults() -> str:
    return "\n\n".join(part["about"] for part in load("faults.json")["parts"])


def _faults() -> Iterator[dict[str, Any]]:
    """Each fault, with its time in timeouts."""
    parts = load("faults.json")["parts"]
    for part in parts:
        for one in part["faults"]:
            seconds = one["seconds"] / part["timeout"]
            yield {**one, "timeout": part["timeout"], "timeouts": seconds}


def kills() -> tuple[list[str], list[list[str]]]:
    """A row for each strategy."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in _runs():
        groups.setdefault(run["strategy"], []).append(run)
    rows = []
    for strategy, runs in groups.items():
        found = [kill for run in runs for kill in run["kills"]]
        whole = sum(kill["whole"] and not kill["lost"] for kill in found)
        rows.append(
            [
                f"`{strategy}`",
                str(len(found)),
                str(Counter(kill["when"] for kill in found)["at a checkpoint"]),
                f"{whole} of {len(found)}",
                str(sum(kill["left"] for kill in found)),
                f"{max(run['apart'] for run in runs):.1e} ({len(runs)} runs)",
            ]
        )
    heads = ["strategy", "kills", "of them at a checkpoint", "nothing lost", "processes left"]
    return [*heads, "losses apart at most"], rows


def kills_summary() -> str:
    found = [kill for run in _runs() for kill in run["kills"]]
    whole = sum(kill["whole"] and not kill["lost"] for kill in found)
    equal = sum(run["apart"] == 0 for run in _runs())
    early = sum(kill["step"] == 0 for kill in found)
    return (
        f"After {whole} of {len(found)} kills the newest checkpoint was whole, and none that the "
        f"run had announced was missing ({early} came before the first); "
        f"{equal} of {len(list(_runs()))} runs ended with the "
        "losses of a run that nobody disturbed, bit for bit."
    )


def about_kills() -> str:
    return "\n\n".join(part["about"] for part in load("kills.json")["parts"])


def _runs() -> Iterator[dict[str, Any]]:
    for part in load("kills.json")["parts"]:
        yield from part["runs"]


def changes() -> tuple[list[str], list[list[str]]]:
    """A row for each strategy: medians over its runs."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for part in load("elastic.json")["parts"]:
        for run in part["runs"]:
            groups.setdefault(run["strategy"], []).append(run)
    rows = []
    for strategy, runs in groups.items():
        kinds = zip(*(run["changes"] for run in runs), strict=True)
        cells = [_change(list(kind)) for kind in kinds]
        repeated = max(run["changes"][-1]["repeated"] for run in runs)
        apart = max(run["apart"] for run in runs)
        rows.append([f"`{strategy}`", *cells, str(repeated), f"{apart:.1e}"])
    heads = ["strategy", "asked for fewer", "asked for more", "a rank is killed"]
    return [*heads, "steps repeated then", "losses apart at most"], rows


def _change(found: list[dict[str, Any]]) -> str:
    first = found[0]
    seconds = median(change["seconds"] for change in found)
    return f"{first['before']} to {first['after']}: {seconds:.1f} s"


def about_changes() -> str:
    return "\n\n".join(part["about"] for part in load("elastic.json")["parts"])
