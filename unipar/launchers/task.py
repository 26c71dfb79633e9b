"""What a launcher is given to run."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unipar.launch.elastic import Elastic
from unipar.world import Placement


@dataclass(frozen=True)
class Task:
    """What a launcher is to run: one function, in every process of a run.

    Attributes:
        fn: what every process calls, with where it stands; may be a closure.
        devices: processes on each node.
        num_nodes: number of machines.
        device_type: the kind of device, which the placements carry.
        timeout: how long a collective waits for a rank, in seconds.
        max_restarts: how often the whole group is started again after a rank fails.
        grace_period: seconds that the processes have to end when they are asked to.
        save_signal: the signal that makes a run save and go on, or ``None``.
        directory: a private, empty one. What does not run on this machine alone needs it on a file
            system that all its machines share.
        name: what a queue shows.
        restart: how many times the group has been started before.
        elastic: how the number of processes may change; ``None``: it does not.
    """

    fn: Callable[[Placement], Any]
    devices: int
    num_nodes: int
    device_type: str
    timeout: float
    max_restarts: int
    grace_period: float
    save_signal: signal.Signals | None
    directory: Path
    name: str = "unipar"
    restart: int = 0
    elastic: Elastic | None = None

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.devices * self.num_nodes
