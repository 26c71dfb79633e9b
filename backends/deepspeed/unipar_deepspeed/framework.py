"""Bringing DeepSpeed up in this process, without its banners."""

from __future__ import annotations

import importlib.util
import logging
import os
import warnings
from importlib import metadata
from types import ModuleType
from typing import Any

from torch.nn import functional

from unipar.errors import ConfigError
from unipar.strategy import Availability
from unipar.utils.logs import quiet_framework
from unipar.world import Placement, World

LOGGERS = ("DeepSpeed", "deepspeed")
_TESTED = (0, 19)


def availability() -> Availability:
    """Return whether a DeepSpeed that is known to work is installed; it is not imported."""
    if importlib.util.find_spec("deepspeed") is None:
        return Availability(False, "DeepSpeed is not installed.", "unipar install deepspeed")
    version = metadata.version("deepspeed")
    if tuple(int(part) for part in version.split(".")[:2]) != _TESTED:
        return Availability(
            False,
            f"DeepSpeed {version} is installed, and this backend works with "
            f"{'.'.join(map(str, _TESTED))}.",
            "unipar install deepspeed",
        )
    return Availability(ok=True)


def load() -> ModuleType:
    """DeepSpeed itself.

    Raises:
        ConfigError: it is installed, and cannot be imported.
    """
    try:
        with quiet_framework(*LOGGERS):
            import deepspeed  # pyright: ignore[reportMissingImports]
    except Exception as error:
        raise ConfigError(
            f"DeepSpeed {metadata.version('deepspeed')} is installed and fails to import: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}. "
            "Reinstall it for this torch: unipar install deepspeed."
        ) from error
    return deepspeed


def start(world: World) -> dict[str, str | None]:
    """Let DeepSpeed take over the process group that unipar has made. Collective.

    Returns:
        The environment variables that were set for it, with what they were before.
    """
    before = _set_environment(world.placement)
    deepspeed = load()
    for handler in logging.getLogger(LOGGERS[0]).handlers:
        # It has a level of its own, above what unipar's debug level is to show.
        handler.setLevel(logging.NOTSET)
    with quiet_framework(*LOGGERS):
        if world.device.type == "cpu":
            # It would be compiled when first used, and leaves its segments in /dev/shm.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    if not logging.getLogger("unipar").isEnabledFor(logging.DEBUG):
        # DeepSpeed 0.19 calls deprecated functions of torch in every step.
        warnings.filterwarnings("ignore", module=r"(deepspeed|torch\.distributed)\b")
    return before


def stop(before: dict[str, str | None]) -> None:
    """Let go of the process group, and put environment variables back to what they were."""
    from deepspeed.comm import comm  # pyright: ignore[reportMissingImports]
    from deepspeed.utils import groups  # pyright: ignore[reportMissingImports]

    # Another session of this process has another group, and DeepSpeed would keep to the first.
    groups._release_process_group_references()
    comm.cdb = None
    _give_back_linear()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _give_back_linear() -> None:
    """Have torch's linear layer again, which stage 3 replaces for as long as the process lives.

    DeepSpeed 0.19.8, runtime/zero/partition_parameters.py, ``_enable_mem_efficient_linear``. Other
    strategies would compute by DeepSpeed's, which adds its bias in place: to what selective
    recomputation keeps.
    """
    from deepspeed.runtime.zero import partition_parameters as zero  # pyright: ignore

    if functional.linear is zero.zero3_linear_wrap:
        patches: Any = zero.InsertPostInitMethodToModuleSubClasses
        functional.linear = patches.linear_bk


def _set_environment(placement: Placement) -> dict[str, str | None]:
    # DeepSpeed reads its place from here, whatever group there is. Its local rank is the number of
    # the GPU that it takes, and under Open MPI it insists on two variables that agree.
    local = str(placement.device_index)
    wanted = {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.size),
        "LOCAL_RANK": local,
        "DS_ACCELERATOR": placement.device_type,
    }
    if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:
        wanted["OMPI_COMM_WORLD_LOCAL_RANK"] = local
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    return before
