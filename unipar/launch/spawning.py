"""Running a loop of one's own in several processes, from a plain script."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeVar

from unipar import launch
from unipar.utils.devices import DeviceChoice, resolve_device_type, resolve_num_devices
from unipar.world import Placement

T = TypeVar("T")


def spawn(
    fn: Callable[[Placement], T],
    *,
    devices: int | Literal["auto"] = "auto",
    device: DeviceChoice = "auto",
    timeout: float = 1800.0,
    max_restarts: int = 0,
) -> T:
    """Call ``fn(placement)`` in each process of a run, and return what rank 0's call returns.

    Where ``torchrun``, ``srun`` or ``mpirun`` has started the processes, this one is among them
    and ``fn`` is called here; otherwise ``devices`` processes are started, or none for a single
    one. Pass the placement on: ``unipar.Session("ddp", placement=placement)``.

    Args:
        fn: what every process runs; may be a closure, and needs no ``__main__`` guard.
        devices: processes on this machine; ``"auto"``: each GPU, or one process on a CPU.
        device: ``"cpu"``, ``"cuda"``, or ``"auto"``.
        timeout: seconds that a collective waits for a missing rank.
        max_restarts: how often a failed group of processes is started again.

    Raises:
        ConfigError: these processes cannot be started here.
        WorkerError: one of them failed.
    """
    device_type = resolve_device_type(device)
    found = launch.detect()
    if found is not None:
        return fn(dataclasses.replace(found, device_type=device_type, timeout=timeout))
    number = resolve_num_devices(devices, device_type)
    if number == 1 and max_restarts == 0:
        return fn(Placement(device_type=device_type, timeout=timeout))
    return launch.run(
        fn, devices=number, device_type=device_type, timeout=timeout, max_restarts=max_restarts
    )
