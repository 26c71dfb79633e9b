"""Processes started by ``torchrun``, or by anything else that sets the same variables."""

from __future__ import annotations

from unipar.errors import ConfigError
from unipar.launch.environment import Environment
from unipar.world import Placement

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")


class Torchrun(Environment):
    name = "torchrun"
    prefixes = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")

    def detect(self) -> bool:
        return any(self.variables.get(name) for name in ("RANK", "LOCAL_RANK"))

    def placement(self) -> Placement:
        rank, size = self.number("RANK"), self.number("WORLD_SIZE")
        local_rank = self.number("LOCAL_RANK")
        self.host()
        self.port()
        self.below(rank, "RANK", size, "WORLD_SIZE")
        local_size = self._local_size(size)
        self.below(local_rank, "LOCAL_RANK", local_size, "LOCAL_WORLD_SIZE")
        if local_size > size:
            raise ConfigError(
                f"LOCAL_WORLD_SIZE={local_size} is more than WORLD_SIZE={size}: one of them comes "
                "from another launch; unset it."
            )
        return Placement(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            node_rank=self.number("GROUP_RANK", default=rank // local_size),
            num_nodes=self.number("GROUP_WORLD_SIZE", default=-(-size // local_size)),
            init_method="env://" if size > 1 else None,
            restart=self.number("TORCHELASTIC_RESTART_COUNT", default=0),
        )

    def _local_size(self, size: int) -> int:
        # Launchers that set no LOCAL_WORLD_SIZE are common; only on one machine can it be told.
        one_machine = size == 1 or self.variables.get("MASTER_ADDR") in _THIS_MACHINE
        return self.number("LOCAL_WORLD_SIZE", default=size if one_machine else None)
