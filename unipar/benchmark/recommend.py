"""One sentence that says which strategy to pick, and why, or why none can be named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from unipar.benchmark.load import BUSY
from unipar.benchmark.report.text import devices, difference, join, number, percent, seconds, size
from unipar.benchmark.result import CellResult, Scaling
from unipar.benchmark.rounds import paired
from unipar.benchmark.statistics import ENOUGH, LEAST, Estimate

SUPERLINEAR = 1.05
"""Devices that gain more than this beside one were not timed under the same conditions."""

Call = Literal["clear", "too close", "too noisy", "nothing"]


@dataclass(frozen=True)
class Judgement:
    """Which cell is the fastest of those that do not drift, and whether that can be said.

    Attributes:
        call: whether a winner can be named.
        fastest: the cell with the highest throughput, whatever that is worth; ``None`` where
            nothing right was measured.
        equals: the cells that no repeat tells from it.
        doubts: why no winner is named, each a clause.
        remedy: what to do about these, as an imperative.
    """

    call: Call
    fastest: CellResult | None = None
    equals: tuple[CellResult, ...] = ()
    doubts: tuple[str, ...] = ()
    remedy: str = ""

    @property
    def winner(self) -> CellResult | None:
        """The cell to pick, where one can be named."""
        return self.fastest if self.call == "clear" else None


def judge(cells: Sequence[CellResult], scaling: Sequence[Scaling]) -> Judgement:
    """Find the fastest cell that does not drift, and everything that speaks against naming it.

    Args:
        cells: all of a benchmark's. Hand-written loops among them are never picked.
        scaling: what is known of the strategies on several numbers of devices.
    """
    right = [cell for cell in measured(cells) if not drifts(cell)]
    if not right:
        return Judgement("nothing")
    fastest = max(right, key=_speed)
    rivals = [(cell, paired(cell, fastest)) for cell in right if cell is not fastest]
    equals = [(cell, ratio) for cell, ratio in rivals if not ratio or ratio.verdict() != "more"]
    doubts: list[str] = []
    remedy = (
        f"run it again with the same --output and --repeats {max(5, 2 * len(fastest.trials))} "
        "(what is finished is kept), and nothing else on the machine"
    )
    if (fewest := min(len(cell.trials) for cell in right)) < ENOUGH:
        told = "1 repeat shows" if fewest == 1 else f"{fewest} repeats show"
        doubts.append(f"{told} too little of the noise")
    load = max((cell.load or 0.0 for cell in right), default=0.0)
    if load > BUSY:
        doubts.append(f"other processes had up to {percent(load)} of the cores meanwhile")
        remedy = _QUIET
    labels = {cell.cell.label for cell in right}
    gains = [
        (gain, one.label, count)
        for one in scaling
        if one.label in labels
        for gain, count in zip(one.efficiency, one.devices, strict=True)
    ]
    if gains and max(gains)[0] > SUPERLINEAR:
        gain, label, count = max(gains)
        doubts.append(
            f"an efficiency of {percent(gain)} ({label} on {devices(count)}) is more than devices "
            "can give"
        )
        remedy = _QUIET
    wide = [(cell, ratio) for cell, ratio in equals if ratio and ratio.verdict() == "unknown"]
    if wide and fewest >= ENOUGH:
        doubts.append(_interval(*wide[0], fastest))
    beside = tuple(cell for cell, _ in equals)
    if doubts:
        return Judgement("too noisy", fastest, beside, tuple(doubts), remedy)
    return Judgement("too close" if equals else "clear", fastest, beside)


_QUIET = "end what else runs on this machine, and run it again with --repeats 5 and a new --output"


def recommend(cells: Sequence[CellResult], scaling: Sequence[Scaling]) -> str:
    """Name the fastest that does not drift, where the repeats can tell; else say what to do.

    Args:
        cells: all of a benchmark's. Hand-written loops among them are never picked.
        scaling: what is known of the strategies on several numbers of devices.
    """
    offered = [cell for cell in cells if not cell.cell.raw]
    timed = measured(cells)
    if not timed:
        return _nothing(offered)
    found = judge(cells, scaling)
    pick = found.fastest
    if pick is None:
        apart = [f"{name(cell)} (by {apart_by(cell)})" for cell in timed]
        return f"Pick none of these, for every loss drifts: {join(apart)}."
    asides = [*_drifting(pick, timed), *_parity(pick, timed)]
    if found.call == "too noisy":
        told = f"Too noisy to name a winner: {'; '.join(found.doubts)}. {_sentence(found.remedy)}"
    elif found.call == "too close":
        told = f"Too close to call: {_equal(pick, found.equals)}"
    else:
        right = [cell for cell in timed if not drifts(cell)]
        reasons = [_figures(pick), *_growth(pick, scaling), _standing(pick, right, offered)]
        asides = [reason for reason in [*reasons, *asides] if reason]
        return f"Pick {name(pick)}: {'; '.join(asides)}."
    return " ".join([told, *(_sentence(aside) for aside in asides)])


def measured(cells: Iterable[CellResult]) -> list[CellResult]:
    """Those that have a throughput, but for loops written by hand."""
    return [cell for cell in cells if not cell.cell.raw and _speed(cell)]


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


def _equal(pick: CellResult, equals: Sequence[CellResult]) -> str:
    """Names of those that are as fast as each other, by what they hold."""
    held = [(cell, peak(cell)) for cell in (pick, *equals)]
    told = [name(cell) if one is None else f"{name(cell)} ({size(one)})" for cell, one in held]
    sizes = [one for _, one in held if one is not None]
    least = ""
    if len(sizes) == len(held) and min(sizes) * (1 + LEAST) < max(sizes):
        fullest = min(held, key=lambda pair: pair[1] or 0)
        least = f" Of these {name(fullest[0])} holds least."
    return (
        f"{join(told)} differ by no more than two runs of one program do.{least} Choose by memory, "
        "or tell smaller differences by more --repeats with the same --output."
    )


def _interval(rival: CellResult, ratio: Estimate, fastest: CellResult) -> str:
    return (
        f"a step of {name(rival)} takes {ratio.low:.2f} to {ratio.high:.2f} times as long as one "
        f"of {name(fastest)} (95 % interval)"
    )


def _sentence(clause: str) -> str:
    return f"{clause[0].upper()}{clause[1:]}."


def _standing(pick: CellResult, right: Sequence[CellResult], offered: Sequence[CellResult]) -> str:
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


def _drifting(pick: CellResult, timed: Sequence[CellResult]) -> list[str]:
    wrong = [cell for cell in timed if drifts(cell) and _speed(cell) > _speed(pick)]
    if not wrong:
        return []
    names = join(f"{name(cell)} (by {apart_by(cell)})" for cell in wrong)
    return [f"what is faster drifts: {names}"]


def _parity(pick: CellResult, timed: Sequence[CellResult]) -> list[str]:
    references = {cell.parity.reference for cell in timed if cell.parity}
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


def drifts(result: CellResult) -> bool:
    """Return whether its loss is wrong, as far as it was compared with anything."""
    return result.parity is not None and result.parity.drifts


def apart_by(result: CellResult) -> str:
    """How far its loss is from the reference's, and whose that is."""
    assert result.parity
    return f"{difference(result.parity.difference)} from {result.parity.reference}"


def name(result: CellResult) -> str:
    """``ddp on 4 devices``."""
    return f"{result.cell.label} on {devices(result.cell.devices)}"
