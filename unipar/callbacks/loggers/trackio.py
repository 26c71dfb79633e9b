"""Metrics to trackio."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from unipar.callbacks.loggers.base import Logger, recall, remember
from unipar.callbacks.records import RunInfo


class TrackioLogger(Logger):
    """Logs to trackio; a resumed run goes on in the same trackio run.

    Args:
        project: the project's name.
        **options: passed to ``trackio.init``.
    """

    package = "trackio"
    extra = "trackio"

    def __init__(self, project: str = "unipar", **options: Any) -> None:
        self.project = project
        self.options = options
        self._run: Any = None

    def start(self, run: RunInfo) -> None:
        options: dict[str, Any] = {"config": dict(run.config), "embed": False, **self.options}
        name = recall(run, "trackio")
        if name is not None:
            options |= {"name": name, "resume": "allow"}
        self._run = import_module("trackio").init(self.project, **options)
        remember(run, "trackio", self._run.name)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
            self._run = None
