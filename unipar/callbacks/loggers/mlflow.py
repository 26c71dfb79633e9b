"""Metrics to MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from unipar.callbacks.loggers.base import Logger, flat_config, recall, remember
from unipar.callbacks.records import RunInfo
from unipar.errors import Terminated

_MAX_PARAMS = 100  # in one request, by MLflow's REST API


class MLflowLogger(Logger):
    """Logs to MLflow; a resumed run goes on in the same MLflow run.

    The client is used and not MLflow's global active run, so the caller's own is left alone.

    Args:
        experiment: the experiment's name; ``MLFLOW_EXPERIMENT_NAME``, or ``unipar``, if left out.
        tracking_uri: the server or store; MLflow's own default (``MLFLOW_TRACKING_URI``) if left
            out.
    """

    package = "mlflow"
    extra = "mlflow"

    def __init__(self, experiment: str | None = None, tracking_uri: str | None = None) -> None:
        self.experiment = experiment
        self.tracking_uri = tracking_uri
        self._client: Any = None
        self._entities: Any = None
        self._run_id = ""

    def start(self, run: RunInfo) -> None:
        self._client = import_module("mlflow").MlflowClient(self.tracking_uri)
        self._entities = import_module("mlflow.entities")
        run_id = recall(run, "mlflow")
        if run_id is not None:
            self._run_id = run_id
            self._client.update_run(run_id, status="RUNNING")
            return
        created = self._client.create_run(self._experiment_id(), run_name=run.output_dir.name)
        self._run_id = created.info.run_id
        config = flat_config(run.config)
        params = [self._entities.Param(key, str(value)) for key, value in config.items()]
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + _MAX_PARAMS])
        remember(run, "mlflow", self._run_id)

    def _experiment_id(self) -> str:
        name = self.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "unipar")
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found else self._client.create_experiment(name)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metric = self._entities.Metric
        rows = [metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=rows)

    def close(self) -> None:
        self._terminate("FINISHED")

    def fail(self, error: BaseException) -> None:
        self._terminate(
            "KILLED" if isinstance(error, (KeyboardInterrupt, Terminated)) else "FAILED"
        )

    def _terminate(self, status: str) -> None:
        if self._client is not None:
            self._client.set_terminated(self._run_id, status)
            self._client = None
