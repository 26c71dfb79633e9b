"""Loggers, and how a run finds them by name."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from unipar.callbacks.loggers.base import Logger
from unipar.callbacks.loggers.callback import LoggerCallback
from unipar.callbacks.loggers.jsonl import JSONLLogger, read_metrics
from unipar.errors import ConfigError, did_you_mean

LOGGERS = {
    "jsonl": "unipar.callbacks.loggers.jsonl:JSONLLogger",
    "tensorboard": "unipar.callbacks.loggers.tensorboard:TensorBoardLogger",
    "wandb": "unipar.callbacks.loggers.wandb:WandbLogger",
    "mlflow": "unipar.callbacks.loggers.mlflow:MLflowLogger",
    "prometheus": "unipar.callbacks.loggers.prometheus:PrometheusLogger",
    "trackio": "unipar.callbacks.loggers.trackio:TrackioLogger",
}
"""The loggers that can be asked for by name, and where they are."""


def resolve_loggers(loggers: Iterable[str | Logger] = ()) -> list[Logger]:
    """Make a run's loggers, ``metrics.jsonl`` first among them, and check that they can run.

    Args:
        loggers: names of :data:`LOGGERS`, or loggers.

    Raises:
        ConfigError: a name is unknown, or the package that a logger needs is not installed.
    """
    if isinstance(loggers, (str, Logger)):
        raise ConfigError(f"loggers={loggers!r} must be a list: loggers=[{loggers!r}].")
    found = [_resolve(logger) for logger in loggers]
    if not any(isinstance(logger, JSONLLogger) for logger in found):
        found.insert(0, JSONLLogger())
    for logger in found:
        logger.check()
    return found


def _resolve(logger: str | Logger) -> Logger:
    if isinstance(logger, Logger):
        return logger
    if not isinstance(logger, str):
        raise ConfigError(
            f"a logger is {logger!r}; give a name ({', '.join(LOGGERS)}) or an instance of a "
            "subclass of unipar.callbacks.Logger."
        )
    if logger not in LOGGERS:
        raise ConfigError(
            f"unknown logger '{logger}'.{did_you_mean(logger, LOGGERS)} "
            f"Allowed: {', '.join(LOGGERS)}, or an instance of a subclass of "
            "unipar.callbacks.Logger."
        )
    module, _, name = LOGGERS[logger].partition(":")
    return getattr(importlib.import_module(module), name)()


__all__ = [
    "LOGGERS",
    "JSONLLogger",
    "Logger",
    "LoggerCallback",
    "read_metrics",
    "resolve_loggers",
]
