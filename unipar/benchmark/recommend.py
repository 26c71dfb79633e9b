"""One sentence that says which strategy to pick, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from unipar.benchmark.report.text import devices, difference, join, number, seconds, size
from unipar.benchmark.result import CellResult, Scaling


def recommend(cells: Sequence[CellResult], scaling: Sequence[Scaling]) -> str:
    """Name the fastest that does not drift; of those that tie with it, the one that holds least.

    Args:
        cells: all of a benchmark's. Hand-written loops among them are never picked.
        scaling: what is known of the strategies on several numbers of devices.
    """
    offered = [cell for cell in cells if not cell.cell.raw]
    measured = [cell for cell in offered if _speed(cell)]
    if not measured:
        return _nothing(offered)
    right = [cell for cell in measured if not _drifts(cell)]
    if not right:
        apart = [f"{_name(cell)} (by {_apart(cell)})" for cell in measured]
        return f"Pick none of these, for every loss drifts: {join(apart)}."
    fastest = max(right, key=_speed)
    ties = [cell for cell in _beside(fastest, right) if cell.cell.label in fastest.ties]
    # Among equals of unknown memory the fastest stays first.
    pick = min([fastest, *ties], key=lambda cell: peak(cell) or float("inf"))
    equals = [cell for cell in (fastest, *ties) if cell is not pick]
    reasons = [
        _figures(pick),
        *_growth(pick, scaling),
        _standing(pick, equals, right, offered),
        *_drifting(pick, measured),
        *_parity(pick, measured),
    ]
    return f"Pick {_name(pick)}: {'; '.join(reason for reason in reasons if reason)}."


def peak(result: CellResult) -> int | None:
    """The most bytes that any rank held in any repeat; ``None`` where it was not measured."""
    peaks = [rank.memory.peak for trial in result.trials for rank in trial.ranks if rank.memory]
    return max(peaks, default=None)


def _nothing(offered: Sequence[CellResult]) -> str:
    if not offered:
        return "Nothing was measured: there was nothing to run."
    counts = Counter(cell.status for cell in offered)
    return f"Nothing was measured: {join(f'{count} {status}' for status, count in counts.items())}."


def _figures(pick: CellResult) -> str:
    figures = [f"{number(_speed(pick))} items/s"]
    if pick.step_seconds:
        figures.append(f"{seconds(pick.step_seconds.median)} a step")
    held = peak(pick)
    if held is not None:
        figures.append(f"{size(held)} on the fullest rank")
    return ", ".join(figures)


def _standing(
    pick: CellResult,
    equals: Sequence[CellResult],
    right: Sequence[CellResult],
    offered: Sequence[CellResult],
) -> str:
    if equals:
        held = [(cell, peak(cell)) for cell in equals]
        others = [
            f"{cell.cell.label} ({size(bytes_)})" if bytes_ is not None else cell.cell.label
            for cell, bytes_ in held
        ]
        less = peak(pick) is not None and all(bytes_ is not None for _, bytes_ in held)
        outcome = ", and needs the least memory of them" if less else ""
        return f"as fast as {join(others)} within the noise{outcome}"
    others = _beside(pick, right)
    full = [cell for cell in _beside(pick, offered) if cell.status == "out of memory"]
    names = join(cell.cell.label for cell in full) if full else ""
    if full and not others:
        return f"nothing else that was tried fits there, for {names} ran out of memory"
    short = f", while {names} ran out of memory" if full else ""
    if not others:
        return short.removeprefix(", ")
    second = max(others, key=_speed)
    factor = f"{_speed(pick) / _speed(second):.2f} times as fast as"
    return f"{factor} {second.cell.label}, the next on as many devices{short}"


def _drifting(pick: CellResult, measured: Sequence[CellResult]) -> list[str]:
    wrong = [cell for cell in measured if _drifts(cell) and _speed(cell) > _speed(pick)]
    if not wrong:
        return []
    names = join(f"{_name(cell)} (by {_apart(cell)})" for cell in wrong)
    return [f"what is faster drifts: {names}"]


def _parity(pick: CellResult, measured: Sequence[CellResult]) -> list[str]:
    references = {cell.parity.reference for cell in measured if cell.parity}
    if pick.parity or pick.cell.label in references:
        return []
    return ["its loss could be compared with nothing"]


def _growth(pick: CellResult, scaling: Sequence[Scaling]) -> list[str]:
    own = next((one for one in scaling if one.label == pick.cell.label), None)
    if own is None or pick.cell.devices not in own.devices:
        return []
    at = own.devices.index(pick.cell.devices)
    clauses = []
    if pick.cell.devices > 1 and 1 in own.devices:
        clauses.append(f"{own.speedup[at]:.2f} times its speed on 1 device")
    timed = zip(own.devices, own.seconds, strict=True)
    more = [time for count, time in timed if count > pick.cell.devices]
    if more and min(more) >= own.seconds[at]:
        clauses.append("more devices make it no faster")
    return clauses


def _beside(pick: CellResult, cells: Sequence[CellResult]) -> list[CellResult]:
    return [
        cell for cell in cells if cell.cell.devices == pick.cell.devices and cell.cell != pick.cell
    ]


def _speed(result: CellResult) -> float:
    return result.items_per_second.median if result.items_per_second else 0.0


def _drifts(result: CellResult) -> bool:
    return result.parity is not None and result.parity.drifts


def _apart(result: CellResult) -> str:
    assert result.parity
    return f"{difference(result.parity.difference)} from {result.parity.reference}"


def _name(result: CellResult) -> str:
    return f"{result.cell.label} on {devices(result.cell.devices)}"
