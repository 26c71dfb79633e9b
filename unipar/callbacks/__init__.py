"""Watching a run: progress, metrics, profiles, and callbacks of one's own."""

from __future__ import annotations

from unipar.callbacks.base import Callback, RunInfo, StepRecord
from unipar.callbacks.loggers import (
    JSONLLogger,
    Logger,
    LoggerCallback,
    read_metrics,
    resolve_loggers,
)
from unipar.callbacks.profiler import Profiler
from unipar.callbacks.progress import ProgressBar

__all__ = [
    "Callback",
    "JSONLLogger",
    "Logger",
    "LoggerCallback",
    "Profiler",
    "ProgressBar",
    "RunInfo",
    "StepRecord",
    "read_metrics",
    "resolve_loggers",
]
