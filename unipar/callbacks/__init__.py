"""Watching a run: progress, metrics, profiles, and the reader's own callbacks."""

from __future__ import annotations

from unipar.callbacks.base import Callback, RunInfo, StepRecord

__all__ = ["Callback", "RunInfo", "StepRecord"]
