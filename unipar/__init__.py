"""One training loop, any distributed framework.

``fit`` trains a model under the strategy that one field names. ``Session`` is for people who keep
their own loop. Names are imported when they are first used, so that ``import unipar`` costs little
more than ``import torch``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unipar.utils.garbage_collection import no_collection
from unipar.utils.version import __version__ as __version__

if TYPE_CHECKING:
    from unipar.benchmark.api import bench
    from unipar.callbacks import Callback, Logger, RunInfo, RunResult, StepRecord
    from unipar.checkpoint import load_model
    from unipar.config import CheckpointConfig, RunConfig
    from unipar.data import Loader
    from unipar.data.batch import Batch, MicroBatch
    from unipar.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        NonFiniteLossError,
        UniparError,
        WorkerError,
    )
    from unipar.launchers.spawning import spawn
    from unipar.loss import LossSum
    from unipar.objective import Objective
    from unipar.session import Session
    from unipar.strategy import (
        Capabilities,
        Engine,
        EngineSpec,
        StepResult,
        Strategy,
        StrategyOptions,
    )
    from unipar.train.fit import fit
    from unipar.world import Placement, World

_MODULES = {
    "fit": "train.fit",
    "bench": "benchmark.api",
    "spawn": "launchers.spawning",
    "Batch": "data.batch",
    "MicroBatch": "data.batch",
    "Callback": "callbacks",
    "Logger": "callbacks",
    "RunInfo": "callbacks",
    "StepRecord": "callbacks",
    "load_model": "checkpoint",
    "CheckpointConfig": "config",
    "RunConfig": "config",
    "Loader": "data",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "DataError": "errors",
    "NonFiniteLossError": "errors",
    "UniparError": "errors",
    "WorkerError": "errors",
    "LossSum": "loss",
    "Objective": "objective",
    "RunResult": "callbacks",
    "Session": "session",
    "Capabilities": "strategy",
    "Engine": "strategy",
    "EngineSpec": "strategy",
    "StepResult": "strategy",
    "Strategy": "strategy",
    "StrategyOptions": "strategy",
    "Placement": "world",
    "World": "world",
}

__all__ = [
    "Batch",
    "Callback",
    "Capabilities",
    "CheckpointConfig",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Engine",
    "EngineSpec",
    "Loader",
    "Logger",
    "LossSum",
    "MicroBatch",
    "NonFiniteLossError",
    "Objective",
    "Placement",
    "RunConfig",
    "RunInfo",
    "RunResult",
    "Session",
    "StepRecord",
    "StepResult",
    "Strategy",
    "StrategyOptions",
    "UniparError",
    "WorkerError",
    "World",
    "bench",
    "fit",
    "load_model",
    "spawn",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'unipar' has no attribute '{name}'")
    with no_collection():
        value = getattr(importlib.import_module(f"unipar.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
