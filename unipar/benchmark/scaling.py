"""How a job gains from devices, beside Amdahl's law and what its communication must take."""

from __future__ import annotations

from collections.abc import Sequence

from unipar.benchmark.cells import REFERENCE, Cell
from unipar.benchmark.result import CellResult, Interconnect, Scaling


def scalings(cells: Sequence[CellResult], interconnects: Sequence[Interconnect]) -> list[Scaling]:
    """One for each strategy that ran on several numbers of devices, or on more than the reference.

    Where a strategy did not run on one device, one process without a framework stands for it.
    """
    by_label: dict[tuple[str, bool], dict[int, CellResult]] = {}
    for one in cells:
        if one.step_seconds is not None:
            by_label.setdefault((one.cell.label, one.cell.raw), {})[one.cell.devices] = one
    found = []
    for (label, raw), by_devices in by_label.items():
        any_cell = next(iter(by_devices.values())).cell
        plain = by_label.get((_reference_label(any_cell), False), {})
        runs = {1: plain[1], **by_devices} if 1 in plain else by_devices
        if not raw and 1 in runs and len(runs) > 1:
            found.append(_scaling(label, dict(sorted(runs.items())), interconnects))
    return found


def amdahl(devices: Sequence[int], seconds: Sequence[float]) -> float | None:
    """The serial fraction, by least squares of ``T(N) / T(1) = s + (1 - s) / N``.

    Amdahl, "Validity of the single processor approach" (1967). At least 0; above 1 where more
    devices are slower than one. ``None`` without a number of devices above 1.
    """
    whole = dict(zip(devices, seconds, strict=True))
    points = [(1 - 1 / n, t / whole[1] - 1 / n) for n, t in whole.items() if n > 1]
    if not points:
        return None
    return max(sum(x * y for x, y in points) / sum(x * x for x, _ in points), 0.0)


def _scaling(
    label: str, runs: dict[int, CellResult], interconnects: Sequence[Interconnect]
) -> Scaling:
    devices = list(runs)
    seconds = [run.step_seconds.median for run in runs.values() if run.step_seconds]
    speedup = [seconds[0] / one for one in seconds]
    links = {link.devices: link for link in interconnects}
    return Scaling(
        label=label,
        devices=devices,
        seconds=seconds,
        speedup=speedup,
        efficiency=[gain / count for gain, count in zip(speedup, devices, strict=True)],
        serial_fraction=amdahl(devices, seconds),
        modelled=[
            seconds[0] if count == 1 else _modelled(seconds[0], run, links.get(count))
            for count, run in runs.items()
        ],
    )


def _modelled(alone: float, run: CellResult, link: Interconnect | None) -> float | None:
    """``T1 / N + calls * alpha + beta * bytes``; nothing overlaps."""
    traffic = run.trials[0].ranks[0].traffic if run.trials else None
    if link is None or traffic is None:
        return None
    calls = sum(one.count for one in traffic)
    size = sum(one.bytes for one in traffic)
    return alone / link.devices + calls * link.alpha + size * link.beta


def _reference_label(cell: Cell) -> str:
    return cell.model_copy(update={"strategy": REFERENCE}).label
