"""Watching a run: progress, metrics, profiles, and callbacks of one's own."""

from __future__ import annotations

from unipar.callbacks.base import Callback
from unipar.callbacks.loggers import (
    JSONLLogger,
    Logger,
    LoggerCallback,
    read_metrics,
    resolve_loggers,
)
from unipar.callbacks.profiler import Profiler
from unipar.callbacks.progress import ProgressBar
from unipar.callbacks.records import History, RunInfo, RunResult, StepRecord

__all__ = [
    "Callback",
    "History",
    "JSONLLogger",
    "Logger",
    "LoggerCallback",
    "Profiler",
    "ProgressBar",
    "RunInfo",
    "RunResult",
    "StepRecord",
    "read_metrics",
    "resolve_loggers",
]
