"""Starting the processes of a run on this machine."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from unipar.launch.rundir import RunDir
from unipar.world import Placement

T = TypeVar("T")


def run(
    fn: Callable[[Placement], T],
    *,
    devices: int,
    device_type: str = "cpu",
    timeout: float = 1800.0,
    max_restarts: int = 0,
) -> T:
    """Call ``fn(placement)`` in ``devices`` new processes and return what rank 0's call returns."""
    import cloudpickle
    from torch.distributed.elastic.agent.server import WorkerSpec

    from unipar.launch import agent as _agent

    directory = RunDir.create()
    try:
        with directory.payload.open("wb") as file:
            cloudpickle.dump(fn, file)
        start = {
            "path": sys.path,
            "argv": sys.argv,
            "environ": {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // devices))},
            "timeout": timeout,
            "device_type": device_type,
        }
        directory.start.write_text(json.dumps(start))
        spec = WorkerSpec(
            role="unipar",
            local_world_size=devices,
            rdzv_handler=_agent.LoopbackRendezvous(directory.root.name),
            entrypoint=sys.executable,
            args=("-u", str(_agent.WORKER), str(directory.root)),
            max_restarts=max_restarts,
            monitor_interval=0.05,
        )
        agent = _agent.Agent(spec, _agent.WorkerLogs(directory))
        result = agent.run()
        if result.is_failed():
            raise RuntimeError(result.failures)
        with directory.result.open("rb") as file:
            return pickle.load(file)
    finally:
        shutil.rmtree(directory.root, ignore_errors=True)
