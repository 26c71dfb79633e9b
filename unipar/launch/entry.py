"""What a worker process does: take its payload, run it, and leave word of how it ended."""

from __future__ import annotations

import os
import pickle
import signal
from pathlib import Path
from typing import Any

import cloudpickle

from unipar.launch.rundir import RunDir
from unipar.world import Placement


def serve(directory: str, start: dict[str, Any]) -> None:
    """Run the payload of ``directory`` in this process, as the rank that the environment names."""
    run = RunDir(Path(directory))
    placement = _placement(start)
    with run.payload.open("rb") as file:
        fn = pickle.load(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    value = fn(placement)
    if placement.rank == 0:
        partial = run.result.with_suffix(".partial")
        with partial.open("wb") as file:
            cloudpickle.dump(value, file)
        partial.rename(run.result)


def _placement(start: dict[str, Any]) -> Placement:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Placement(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        init_method="env://" if size > 1 else None,
        timeout=start["timeout"],
        device_type=start["device_type"],
        restart=int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    )
