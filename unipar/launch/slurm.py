"""Processes started by Slurm's ``srun``."""

from __future__ import annotations

import re

from unipar.errors import ConfigError
from unipar.launch.environment import Environment
from unipar.world import Placement

_FIRST_PORT, _NUM_PORTS = 15000, 15000


class Slurm(Environment):
    name = "srun"
    prefixes = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_")

    def detect(self) -> bool:
        variables = self.variables
        if "SLURM_PROCID" not in variables:
            return False
        # A batch script is itself a process with a rank, but nothing has started its peers; nor
        # has `srun --pty` started any that would run what is typed in its shell.
        batch = variables.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in variables
        if batch or "SLURM_PTY_PORT" in variables:
            return False
        return self._size() > 1

    def placement(self) -> Placement:
        rank, size = self.number("SLURM_PROCID"), self._size()
        self.below(rank, "SLURM_PROCID", size, "SLURM_NTASKS")
        num_nodes = self.number(
            "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", default=1
        )
        node_rank = self.number("SLURM_NODEID", default=0 if num_nodes == 1 else None)
        self.below(node_rank, "SLURM_NODEID", num_nodes, "SLURM_NNODES")
        local_rank = self.number("SLURM_LOCALID")
        local_size = self._tasks_per_node(size, num_nodes)[node_rank]
        self.below(local_rank, "SLURM_LOCALID", local_size, "tasks on this node")
        return Placement(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=node_rank,
            num_nodes=num_nodes,
            init_method=self.address() or f"tcp://{self._host()}:{self._port()}",
            restart=self.number("SLURM_RESTART_COUNT", default=0),
        )

    def _size(self) -> int:
        return self.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS", default=1)

    def _tasks_per_node(self, size: int, num_nodes: int) -> list[int]:
        """Expand Slurm's ``4(x2),3`` into ``[4, 4, 3]``."""
        names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        if not any(self.variables.get(name) for name in names):
            if size % num_nodes:
                self.text(*names)
            return [size // num_nodes] * num_nodes
        text = self.text(*names)
        counts: list[int] = []
        for part in text.split(","):
            match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
            if match is None:
                raise ConfigError(f"{names[1]}={text!r} cannot be read; expected e.g. '4(x2),3'.")
            counts += [int(match[1])] * int(match[2] or 1)
        if sum(counts) != size or len(counts) != num_nodes:
            raise ConfigError(
                f"{names[1]}={text!r} gives {sum(counts)} tasks on {len(counts)} nodes, but "
                f"SLURM_NTASKS={size} and SLURM_NNODES={num_nodes}: one of them comes from another "
                "allocation; start the script by srun."
            )
        return counts

    def _host(self) -> str:
        """The node of rank 0: ``gpu[003-007,9],login`` names ``gpu003`` first."""
        nodes = self.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        first = re.split(r",(?![^\[]*\])", nodes)[0]
        return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)

    def _port(self) -> int:
        """A port that all ranks know, and that no other step on the node is likely to use."""
        if self.variables.get("MASTER_PORT"):
            return self.port()
        job, step = (
            self.number("SLURM_JOB_ID", "SLURM_JOBID"),
            self.number("SLURM_STEP_ID", default=0),
        )
        # Neighbouring jobs get distant ports, so that their steps do not meet.
        return _FIRST_PORT + (job * 101 + step) % _NUM_PORTS
