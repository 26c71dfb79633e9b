"""Processes that a script starts by ``fabric.launch()``."""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from unipar.compat.run import current
from unipar.compat.runconfig import file_beside_script
from unipar.engine.trials import host_generators, set_host_generators
from unipar.errors import ConfigError
from unipar.launch import detect
from unipar.utils.devices import resolve_num_devices
from unipar.world import Placement

log = logging.getLogger("unipar")


def missing(devices: int | None, num_nodes: int) -> int:
    """How many processes this one is to be replaced by; 0 if all are there.

    Args:
        devices: asked for on each node; ``None``: those there are, or one for each GPU.
        num_nodes: nodes.

    Raises:
        ConfigError: a launcher has started another number, or would be needed.
    """
    place = current.placement()
    if detect() is not None or place.size > 1:
        if devices is not None and devices * num_nodes != place.size:
            raise ConfigError(
                f"Fabric(devices={devices}, num_nodes={num_nodes}) asks for {devices * num_nodes} "
                f"processes, and {place.size} were started. Start as many, or leave devices and "
                "num_nodes out, which takes those that there are."
            )
        return 0
    if num_nodes > 1:
        raise ConfigError(
            f"Fabric(num_nodes={num_nodes}): this process was started alone. Start the script on "
            f"each node by torchrun --nnodes {num_nodes} --nproc-per-node {devices or 'gpu'} "
            "--rdzv-endpoint HOST:PORT, or by srun or mpirun."
        )
    count = resolve_num_devices("auto" if devices is None else devices, place.device_type)
    return count if count > 1 else 0


def is_interactive() -> bool:
    """Whether there is no script that could be run again."""
    main = sys.modules["__main__"]
    return not hasattr(main, "__file__") or "ipykernel" in sys.modules


def run_again(count: int) -> None:
    """Let ``torchrun`` take the place of this process, and run the script in each of its own.

    Args:
        count: processes.

    Raises:
        ConfigError: there is no script to run.
    """
    if is_interactive():
        raise ConfigError(
            f"fabric.launch() is to start {count} processes, and what runs is no script, so there "
            "is nothing to run in them. Put the training into a function, and call "
            "fabric.launch(function)."
        )
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", spec.name.removesuffix(".__main__")] if spec is not None else [sys.argv[0]]
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *run, *program, *sys.argv[1:]])


def spawn(count: int, function: Callable[[], Any], *, would_fork: bool) -> Any:
    """Run a function in processes of this machine, which end with it.

    Args:
        count: processes.
        function: is sent to each by value.
        would_fork: whether Fabric would fork, so that they would have all that is here.

    Returns:
        What it returns on rank 0.
    """
    from unipar.launchers.spawning import spawn as start

    if would_fork:
        log.warning(
            "the function is sent to %d processes, which import modules anew: what was changed in "
            "a module since its import, such as a setting or a patched function, is not so there, "
            "and tensors are copies. Do such changes in the function that fabric.launch is given.",
            count,
        )
    place = current.placement()
    drawn = torch.get_rng_state(), host_generators()
    run = functools.partial(_spawned, function, file_beside_script(), list(sys.argv), drawn)
    device: Any = place.device_type
    return start(run, devices=count, device=device, timeout=place.timeout)


def _spawned(
    function: Callable[[], Any], file: Path, argv: list[str], drawn: Any, place: Placement
) -> Any:
    sys.argv = argv
    current.stand(place, file)
    # Each goes on drawing where the script was, as in Fabric.
    torch.set_rng_state(drawn[0])
    set_host_generators(drawn[1])
    try:
        return function()
    finally:
        current.close()
