"""Torch's profiler, as a script asks for it by Accelerate's arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from unipar.compat.accelerate.plugins import ProfileKwargs
from unipar.compat.accelerate.processes import Processes

_KEPT = ("record_shapes", "profile_memory", "with_stack", "with_flops", "with_modules")


@contextlib.contextmanager
def profile(asked: ProfileKwargs, processes: Processes) -> Iterator[Any]:
    """A block under the profiler; a trace of each rank goes into ``output_trace_dir``."""
    activities = [
        getattr(torch.profiler.ProfilerActivity, str(one).rpartition(".")[2].upper())
        for one in asked.activities or ()
    ]
    schedule = torch.profiler.schedule(**asked.schedule_option) if asked.schedule_option else None
    with torch.profiler.profile(
        activities=activities or None, schedule=schedule, on_trace_ready=asked.on_trace_ready,
        **{name: getattr(asked, name) for name in _KEPT},
    ) as profiler:  # fmt: skip
        yield profiler
    if asked.output_trace_dir is not None:
        directory = Path(asked.output_trace_dir)
        directory.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(directory / f"profile_{processes.process_index}.json"))
        processes.wait_for_everyone()
