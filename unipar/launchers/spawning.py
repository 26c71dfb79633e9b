"""Running a loop of one's own in several processes, from a plain script."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from unipar import launch
from unipar.launchers.base import LauncherOptions
from unipar.launchers.registry import resolve
from unipar.launchers.task import Task
from unipar.utils.devices import DeviceChoice, resolve_device_type
from unipar.utils.signals import GRACE_PERIOD
from unipar.world import Placement

T = TypeVar("T")


def spawn(
    fn: Callable[[Placement], T],
    *,
    launcher: str | Mapping[str, Any] | LauncherOptions = "local",
    devices: int | Literal["auto"] = "auto",
    num_nodes: int = 1,
    device: DeviceChoice = "auto",
    timeout: float = 1800.0,
    max_restarts: int = 0,
    output_dir: str | Path | None = None,
) -> T:
    """Call ``fn(placement)`` in each process of a run, and return what rank 0's call returns.

    Where ``torchrun``, ``srun`` or ``mpirun`` has started the processes, this one is among them
    and ``fn`` is called here; otherwise ``devices`` processes are started on each of ``num_nodes``
    machines by ``launcher``, or none for a single one of this machine. Pass the placement on:
    ``unipar.Session("ddp", placement=placement)``.

    Args:
        fn: what every process runs; may be a closure, and needs no ``__main__`` guard.
        launcher: what starts them, as :func:`unipar.fit` takes it.
        devices: processes on each machine; ``"auto"``: each GPU, or one process on a CPU.
        num_nodes: machines.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``.
        timeout: seconds that a collective waits for a missing rank.
        max_restarts: how often a failed group of processes is started again.
        output_dir: where a launcher of other machines puts what the processes are given and what
            they print, in reach of all of them; default: a new directory in ``runs``.

    Raises:
        ConfigError: these processes cannot be started.
        WorkerError: one of them failed.
    """
    starter = resolve(launcher)
    found = launch.detect()
    if found is not None:
        device_type = resolve_device_type(device)
        return fn(dataclasses.replace(found, device_type=device_type, timeout=timeout))
    device_type, number = starter.resolve_devices(device, devices, num_nodes)
    if number * num_nodes == 1 and max_restarts == 0 and starter.starts_here:
        return fn(Placement(device_type=device_type, timeout=timeout))
    stamp = time.strftime("%Y%m%d-%H%M%S")
    place = Path(output_dir or Path("runs", f"{stamp}-spawn")).absolute()
    with starter.directory(place) as directory:
        return starter.run(
            Task(
                fn,
                devices=number,
                num_nodes=num_nodes,
                device_type=device_type,
                timeout=timeout,
                max_restarts=max_restarts,
                grace_period=GRACE_PERIOD,
                save_signal=None,
                directory=directory,
                name=getattr(fn, "__name__", "spawn"),
            )
        )
