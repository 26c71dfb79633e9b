"""Metrics to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from unipar.callbacks.loggers.base import Logger, recall, remember
from unipar.callbacks.records import RunInfo


class WandbLogger(Logger):
    """Logs to Weights & Biases; a resumed run goes on in the same W&B run.

    Without arguments the project, the mode and the rest come from W&B's own environment variables
    (``WANDB_PROJECT``, ``WANDB_MODE``, …).

    Args:
        **options: passed to ``wandb.init``.
    """

    package = "wandb"
    extra = "wandb"

    def __init__(self, **options: Any) -> None:
        self.options = options
        self._run: Any = None

    def start(self, run: RunInfo) -> None:
        run.output_dir.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {
            "name": run.output_dir.name,
            "dir": str(run.output_dir),
            "config": dict(run.config),
            **self.options,
        }
        run_id = recall(run, "wandb")
        if run_id is not None:
            options |= {"id": run_id, "resume": "allow"}
        self._run = import_module("wandb").init(**options)
        # W&B refuses its own step to go back, which a resumed run's does: plot over ours.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        remember(run, "wandb", self._run.id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        self._finish(0)

    def fail(self, error: BaseException) -> None:
        self._finish(1)

    def _finish(self, exit_code: int) -> None:
        if self._run is not None:
            self._run.finish(exit_code=exit_code)
            self._run = None
