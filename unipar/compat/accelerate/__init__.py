"""Accelerate's face: an import of ``unipar.compat.accelerate``, and nothing else changes.

The script runs under every strategy with a loop of one's own. Order of data, padding, weighting of
losses and the pace of schedulers are Accelerate's: so, as there, results depend on the number of
ranks. Any name that is not here says when it is imported what to do instead.
"""

from __future__ import annotations

from unipar.compat.accelerate import (
    accelerator,
    data_loader,
    launchers,
    logging,
    optimizer,
    scheduler,
    state,
    tracking,
    utils,
)
from unipar.compat.accelerate.accelerator import Accelerator
from unipar.compat.accelerate.data_loader import skip_first_batches
from unipar.compat.accelerate.launchers import debug_launcher, notebook_launcher
from unipar.compat.accelerate.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from unipar.compat.accelerate.state import DistributedType, PartialState
from unipar.compat.accelerate.utils import (
    find_executable_batch_size,
    is_rich_available,  # pyright: ignore[reportAttributeAccessIssue]
    synchronize_rng_states,
)
from unipar.compat.accelerate_names import TOP

__version__ = "1.15.0"
"""Accelerate's, whose names and rules these are."""

__all__ = [
    "Accelerator", "AutocastKwargs", "DDPCommunicationHookType", "DataLoaderConfiguration",
    "DeepSpeedPlugin", "DistributedDataParallelKwargs", "DistributedType",
    "FullyShardedDataParallelPlugin", "GradScalerKwargs", "InitProcessGroupKwargs", "PartialState",
    "ProfileKwargs", "accelerator", "data_loader", "debug_launcher", "find_executable_batch_size",
    "is_rich_available", "launchers", "logging", "notebook_launcher", "optimizer", "scheduler",
    "skip_first_batches", "state", "synchronize_rng_states", "tracking", "utils",
]  # fmt: skip

__getattr__ = TOP.refusing(__name__)
