"""Figures as people read them: three digits, and a unit that fits."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple


class Unit(NamedTuple):
    """The divisor of a column of figures, and the name that it then has."""

    name: str
    size: float


_SECONDS = (Unit("s", 1.0), Unit("ms", 1e-3), Unit("µs", 1e-6))
_BYTES = (Unit("GiB", 2.0**30), Unit("MiB", 2.0**20), Unit("KiB", 2.0**10), Unit("B", 1.0))


def number(value: float) -> str:
    """Three digits: ``1,234``, ``12.3``, ``0.0123``, ``1.2e-07``."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    return f"{value:.3g}"


def difference(value: float) -> str:
    """A relative difference: ``0``, ``2.1e-06``; infinite where a loss was no number."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.1e}" if value else "0"


def unit_of_seconds(values: Iterable[float | None]) -> Unit:
    """The largest unit in which half of them are at least 1, or else the smallest."""
    return _unit(_SECONDS, values)


def unit_of_bytes(values: Iterable[float | None]) -> Unit:
    """Likewise, for bytes."""
    return _unit(_BYTES, values)


def seconds(value: float) -> str:
    """``12.3 ms``."""
    unit = unit_of_seconds([value])
    return f"{number(value / unit.size)} {unit.name}"


def size(value: float) -> str:
    """``12.3 MiB``."""
    unit = unit_of_bytes([value])
    return f"{number(value / unit.size)} {unit.name}"


def percent(share: float) -> str:
    """``12 %``."""
    return f"{100 * share:.0f} %"


def devices(count: int) -> str:
    """``1 device``, ``4 devices``."""
    return f"{count} device" if count == 1 else f"{count} devices"


def join(items: Iterable[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    *first, last = items
    return f"{', '.join(first)} and {last}" if first else last


def _unit(units: tuple[Unit, ...], values: Iterable[float | None]) -> Unit:
    sizes = [abs(value) for value in values if value]
    middle = statistics.median_low(sizes) if sizes else 0.0
    return next((unit for unit in units if middle >= unit.size), units[-1])
