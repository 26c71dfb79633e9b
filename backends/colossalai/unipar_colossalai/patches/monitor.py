"""Gemini's automatic placement measures a GPU's memory, and on a CPU there is none to measure."""

from __future__ import annotations

from typing import Any

from unipar_colossalai.patches.patch import Patch, Undo


def _start(monitor: Any) -> None:
    """Nothing but the model is counted where memory is the host's."""


def _finish(monitor: Any) -> int:
    monitor.mem_stats.append(0)
    return 0


def _apply() -> Undo:
    import colossalai.legacy.utils.memory as memory  # pyright: ignore
    from colossalai.zero.gemini.memory_tracer.memory_monitor import (  # pyright: ignore
        SyncCudaMemoryMonitor,
    )

    before = SyncCudaMemoryMonitor.start, SyncCudaMemoryMonitor.finish
    capacity = memory.colo_device_memory_capacity
    SyncCudaMemoryMonitor.start, SyncCudaMemoryMonitor.finish = _start, _finish
    # Upstream divides by a number of processes that only its old launcher sets, and is -1.
    memory.colo_device_memory_capacity = lambda device: memory.colo_get_cpu_memory_capacity()

    def undo() -> None:
        SyncCudaMemoryMonitor.start, SyncCudaMemoryMonitor.finish = before
        memory.colo_device_memory_capacity = capacity

    return undo


PATCH = Patch(
    name="auto-placement-on-cpu",
    target="colossalai.zero.gemini.memory_tracer.memory_monitor:SyncCudaMemoryMonitor",
    source="89ab59799b7a525d8b69bbd4a8d8bda99aa321b58cbe4794dcc4f68e7e21637e",
    reason="colossalai/zero/gemini/memory_tracer/memory_monitor.py, SyncCudaMemoryMonitor, calls "
    "torch.cuda; colossalai/legacy/utils/memory.py, colo_device_memory_capacity, is negative",
    device_types=frozenset({"cpu"}),
    plugins=frozenset({"gemini"}),
    apply=_apply,
)
