"""Where one process of a run stands."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Placement:
    """Where this process stands, as its launcher says it.

    Attributes:
        rank: global rank, from 0.
        size: number of processes in the run.
        local_rank: rank among the processes on this node.
        local_size: number of processes on this node.
        node_rank: which node this is, from 0.
        num_nodes: number of nodes.
        init_method: where the processes meet, as ``torch.distributed`` takes it (``env://``,
            ``tcp://host:port``, ``file:///path``); ``None`` for a run of one process, which needs
            no meeting point.
        timeout: how long a collective waits for a rank, in seconds.
        device_type: ``"cpu"``, ``"cuda"``, …
        restart: how many times the group of processes has been restarted after a failure.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    init_method: str | None = None
    timeout: float = 1800.0
    device_type: str = "cpu"
    restart: int = 0

    @property
    def device(self) -> torch.device:
        """The device of this process: by its local rank, or the only one that it is shown.

        Schedulers may show each process its own GPU alone (Slurm's ``--gpus-per-task``, parts of a
        GPU under MIG), which then has number 0 in all of them.
        """
        if self.device_type == "cpu":
            return torch.device("cpu")
        alone = self.device_type == "cuda" and torch.cuda.device_count() == 1
        return torch.device(self.device_type, 0 if alone else self.local_rank)

    @property
    def device_index(self) -> int:
        """The number of the device; of a CPU the local rank, for frameworks that ask for one."""
        index = self.device.index
        return self.local_rank if index is None else index
