"""How much of the machine others had while a trial was timed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

import psutil

from unipar.benchmark.records import Usage

BUSY = 0.25
"""Others that have more of the cores than this decide what is fast."""

_SHORTEST = 0.2
"""Seconds below which the system's clock, which ticks every hundredth, is too coarse."""


def usage() -> Usage:
    """Up to now, of the cores that this process may use, and of its own processes."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    busy = 0.0
    cores = 0
    for number, core in enumerate(psutil.cpu_times(percpu=True)):
        if allowed is None or number in allowed:
            cores += 1
            # What a virtual machine's host gives to others is taken from this one.
            busy += core.user + core.nice + core.system
            busy += sum(getattr(core, kind, 0.0) for kind in ("irq", "softirq", "steal"))
    own = 0.0
    process = psutil.Process()
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            own += sum(one.cpu_times()[:4])
    return Usage(wall=time.monotonic(), cores=cores, busy=busy, own=own)


def of_others(ranks: Sequence[Usage]) -> float | None:
    """The share of the cores that neither idled nor worked for one of these ranks.

    Args:
        ranks: what each used, all in the same time; ``None`` where that was too short to say.
    """
    whole = max((rank.wall * rank.cores for rank in ranks), default=0.0)
    if not ranks or min(rank.wall for rank in ranks) < _SHORTEST:
        return None
    busy = max(rank.busy for rank in ranks)
    return min(max(busy - sum(rank.own for rank in ranks), 0.0) / whole, 1.0)
