"""How much of a step's communication is hidden behind computation: what the profiler saw."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from unipar.benchmark.records import Overlap

Span = tuple[float, float]
"""Begin and end, in microseconds."""


class Profile:
    """Profiles what is done while it is entered.

    On a GPU communication is the kernels of NCCL, and computation all others. On a CPU it is what
    gloo has under way, and the operators of torch that run on other threads than gloo's own.

    Args:
        device: ``"cpu"`` or an accelerator's type.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.overlap: Overlap | None = None
        self._file: Path | None = None

    def keep(self, file: Path) -> None:
        """Also write what was seen there, for chrome://tracing or ui.perfetto.dev."""
        self._file = file

    def __enter__(self) -> Profile:
        activities = [ProfilerActivity.CPU]
        if self._device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)
        self._profile.__enter__()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._device != "cpu":
            torch.get_device_module(self._device).synchronize()
        step = time.perf_counter() - self._began
        self._profile.__exit__(*error)
        if error[0] is None and self._file:
            self._profile.export_chrome_trace(str(self._file))
        if error[0] is None:
            divide = on_cpu if self._device == "cpu" else on_gpu
            communication, computation = divide(self._profile.events() or ())
            if communication:
                self.overlap = Overlap(
                    step=step,
                    communication=total(communication) / 1e6,
                    exposed=total(without(communication, computation)) / 1e6,
                )


def on_cpu(events: Iterable[Any]) -> tuple[list[Span], list[Span]]:
    """Find what communicates and what computes among a profile's events, under gloo."""
    events = list(events)
    theirs = [event for event in events if event.name.startswith("gloo:")]
    threads = {event.thread for event in theirs}
    computing = [
        event
        for event in events
        if event.name.startswith("aten::") and event.thread not in threads and not event.is_async
    ]
    return union(map(_span, theirs)), union(map(_span, computing))


def on_gpu(events: Iterable[Any]) -> tuple[list[Span], list[Span]]:
    """The same where kernels do both: NCCL's are named after it."""
    kernels = [
        event
        for event in events
        if event.device_type.name != "CPU"
        and not event.name.startswith(("Memcpy", "Memset"))
        and not getattr(event, "is_user_annotation", False)
    ]
    theirs = [event for event in kernels if event.name.startswith("nccl")]
    others = [event for event in kernels if not event.name.startswith("nccl")]
    return union(map(_span, theirs)), union(map(_span, others))


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments as spans that do not touch, in order."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def without(spans: Iterable[Span], others: Iterable[Span]) -> Iterator[Span]:
    """Take the moments of others out of those of :func:`union`'s spans."""
    others = list(others)
    for begin, end in spans:
        for other_begin, other_end in others:
            if other_end <= begin:
                continue
            if other_begin >= end:
                break
            if other_begin > begin:
                yield begin, other_begin
            begin = other_end
        if begin < end:
            yield begin, end


def total(spans: Iterable[Span]) -> float:
    """How long all of them are."""
    return sum(end - begin for begin, end in spans)


def _span(event: Any) -> Span:
    return event.time_range.start, event.time_range.end
