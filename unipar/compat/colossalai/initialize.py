"""The processes of a script: joined, and seeded as Colossal-AI seeds them."""

from __future__ import annotations

import os
from typing import Any

import torch

from unipar import launch as launchers
from unipar.compat.colossalai.logging import get_dist_logger
from unipar.compat.colossalai.utils import set_seed
from unipar.compat.run import current
from unipar.compat.tables import Table
from unipar.errors import ConfigError

_chosen: dict[str, Any] = {}


def chosen_strategy() -> str | dict[str, Any] | None:
    """What the script has passed to ``launch``, if it has."""
    return _chosen.get("strategy")


def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str = "nccl",
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,
    *,
    strategy: str | dict[str, Any] | None = None,
    config: Any = None,
) -> None:
    """Join the processes, and seed the generators of Python, NumPy and torch. Collective.

    Args:
        rank: this process's; what a launcher says has to be the same.
        world_size: the number of processes, likewise.
        host: of rank 0, where no launcher has started the processes.
        port: likewise.
        backend: taken by the device, as in Colossal-AI.
        local_rank: this process's rank on its host; left out: by the number of GPUs.
        seed: of all generators, on all ranks.
        verbose: whether rank 0 says so.
        strategy: what ``unipar.yaml`` may say instead; left out: what the plugin asks for.
        config: an argument of versions before 0.4, which has to be empty.

    Raises:
        ConfigError: a launcher says otherwise.
    """
    found = launchers.detect()
    if found is None and world_size > 1:
        local = rank % max(1, torch.cuda.device_count()) if local_rank is None else local_rank
        os.environ |= {
            "RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(local),
            "MASTER_ADDR": host, "MASTER_PORT": str(port),
        }  # fmt: skip
    elif (rank, world_size) != ((found.rank, found.size) if found else (0, 1)):
        raise ConfigError(
            f"launch(rank={rank}, world_size={world_size}) was called in "
            f"{f'rank {found.rank} of {found.size}' if found else 'a single process'}. Pass what "
            "the launcher says, or call launch_from_torch()."
        )
    _join(seed, strategy, config, verbose=verbose)


def launch_from_torch(
    backend: str = "nccl",
    seed: int = 1024,
    verbose: bool = True,
    *,
    strategy: str | dict[str, Any] | None = None,
    config: Any = None,
) -> None:
    """:func:`launch` in processes that ``torchrun`` has started, or in a single one."""
    _join(seed, strategy, config, verbose=verbose)


def launch_from_slurm(
    host: str,
    port: int,
    backend: str = "nccl",
    seed: int = 1024,
    verbose: bool = True,
    *,
    strategy: str | dict[str, Any] | None = None,
    config: Any = None,
) -> None:
    """:func:`launch` in processes that ``srun`` has started, which meet where Slurm says."""
    _check_started("launch_from_slurm", "SLURM_PROCID", "srun python train.py")
    _join(seed, strategy, config, verbose=verbose)


def launch_from_openmpi(
    host: str,
    port: int,
    backend: str = "nccl",
    seed: int = 1024,
    verbose: bool = True,
    *,
    strategy: str | dict[str, Any] | None = None,
    config: Any = None,
) -> None:
    """:func:`launch` in processes that ``mpirun`` has started, which meet at ``host``."""
    _check_started("launch_from_openmpi", "OMPI_COMM_WORLD_RANK", "mpirun -np 2 python train.py")
    os.environ.setdefault("MASTER_ADDR", host)
    os.environ.setdefault("MASTER_PORT", str(port))
    _join(seed, strategy, config, verbose=verbose)


def _check_started(call: str, variable: str, command: str) -> None:
    if variable not in os.environ:
        raise ConfigError(
            f"{call}() found no {variable}: this process was started otherwise. Start it by "
            f"`{command}`, or call launch_from_torch()."
        )


def _join(seed: int, strategy: str | dict[str, Any] | None, config: Any, *, verbose: bool) -> None:
    if config:
        raise ConfigError(
            f"config={config!r} is of Colossal-AI's older interfaces. Write the script for its "
            "Booster first, and pass settings to its plugin."
        )
    _chosen.update(strategy=strategy)
    world = current.world()
    set_seed(seed)
    if verbose:
        get_dist_logger().info(
            f"Distributed environment is initialized, world size: {world.size}", ranks=[0]
        )


__getattr__ = Table("colossalai.initialize").refusing(__name__)
