"""DeepSpeed's face: an import of ``unipar.compat.deepspeed``, and nothing else changes.

The script runs under every strategy with a loop of one's own; without ``unipar.yaml``, under the
one that its configuration asks for. Accumulation, the pace of schedulers and the order of data are
DeepSpeed's: so, as there, results depend on the number of ranks. Any name that is not here says
when it is imported what to do instead.
"""

from __future__ import annotations

from unipar.compat.deepspeed import accelerator, checkpointing, comm, ops, runtime, utils
from unipar.compat.deepspeed.accelerator import get_accelerator
from unipar.compat.deepspeed.comm import init_distributed
from unipar.compat.deepspeed.data import DeepSpeedDataLoader
from unipar.compat.deepspeed.engine import DeepSpeedEngine
from unipar.compat.deepspeed.initializing import add_config_arguments, initialize
from unipar.compat.deepspeed.runtime import zero
from unipar.compat.deepspeed.utils import log_dist, logger
from unipar.compat.deepspeed_names import TOP

__version__ = "0.19.8"
"""DeepSpeed's, whose names and rules these are."""

__all__ = [
    "DeepSpeedDataLoader", "DeepSpeedEngine", "accelerator", "add_config_arguments",
    "checkpointing", "comm", "dist", "get_accelerator", "init_distributed", "initialize",
    "log_dist", "logger", "ops", "runtime", "utils", "zero",
]  # fmt: skip

dist = comm

__getattr__ = TOP.refusing(__name__)
