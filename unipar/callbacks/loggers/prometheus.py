"""Metrics for Prometheus to scrape."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from unipar.callbacks.loggers.base import Logger
from unipar.callbacks.records import RunInfo
from unipar.errors import ConfigError

_HOST, _PORT = "OTEL_EXPORTER_PROMETHEUS_HOST", "OTEL_EXPORTER_PROMETHEUS_PORT"
_GAUGES = {
    "loss": ("unipar_loss", "Mean loss over the items of the last logged step."),
    "grad_norm": ("unipar_gradient_norm", "2-norm of the last logged step's gradient."),
    "lr": ("unipar_learning_rate", "Learning rate of the first parameter group."),
    "items_per_second": ("unipar_items_per_second", "Items over seconds of the last logged step."),
    "peak_memory": ("unipar_peak_memory_bytes", "The most bytes that rank 0 has held."),
}


class PrometheusLogger(Logger):
    """Serves the last logged metrics over HTTP from rank 0 while the run goes on.

    Everything carries the labels ``run``, the output directory's name, and ``strategy``. Nothing
    is asked of who connects, so that other machines may only where ``host`` lets them.

    Args:
        host: the address to listen at; left out: ``OTEL_EXPORTER_PROMETHEUS_HOST``, or
            ``localhost``. ``0.0.0.0`` is every address of the machine.
        port: the port; left out: ``OTEL_EXPORTER_PROMETHEUS_PORT``, or 9464.
    """

    package = "prometheus_client"
    extra = "prometheus"

    def __init__(self, host: str | None = None, port: int | None = None) -> None:
        self.host, self.port = host, port
        self._server: Any = None
        self._thread: Any = None
        self._step: Any = None
        self._gauges: dict[str, Any] = {}
        self._evaluation: Any = None
        self._labels: dict[str, str] = {}

    def start(self, run: RunInfo) -> None:
        client = import_module("prometheus_client")
        # One of the run's own: the process's, which all libraries share, outlives it.
        registry = client.CollectorRegistry()
        self._labels = {"run": run.output_dir.name, "strategy": run.strategy}

        def gauge(name: str, help_text: str, *more: str) -> Any:
            return client.Gauge(name, help_text, [*self._labels, *more], registry=registry)

        self._step = gauge("unipar_step", "The last logged step, from 1.").labels(**self._labels)
        self._step.set(run.start_step)
        # With labels only once there is a value: what a run does not compute is not there.
        self._gauges = {name: gauge(*about) for name, about in _GAUGES.items()}
        self._evaluation = gauge("unipar_evaluation", "The last evaluation's metrics.", "metric")
        for name, help_text, value in (
            ("unipar_world_size", "Processes of the run.", run.world_size),
            ("unipar_restarts", "Restarts of all processes after a failure.", run.restart),
            ("unipar_total_steps", "The step at which the run ends.", run.total_steps),
        ):
            if value is not None:
                gauge(name, help_text).labels(**self._labels).set(value)
        host, port = self._address()
        try:
            self._server, self._thread = client.start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"the metrics cannot be served for Prometheus at {host}:{port}: "
                f"{error.strerror or error}. Choose another port, by {_PORT} or by "
                "PrometheusLogger(port=…), or leave the logger out."
            ) from error

    def _address(self) -> tuple[str, int]:
        host = self.host or os.environ.get(_HOST) or "localhost"
        port = os.environ.get(_PORT) or "9464" if self.port is None else str(self.port)
        if not port.isdecimal() or not 0 < int(port) < 2**16:
            asked = f"{_PORT}={port}" if self.port is None else f"PrometheusLogger(port={port})"
            raise ConfigError(f"{asked} is no port: give a number from 1 to 65535.")
        return host, int(port)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            if name.startswith("eval/"):
                metric = name.removeprefix("eval/")
                self._evaluation.labels(**self._labels, metric=metric).set(value)
            elif name in self._gauges:
                self._gauges[name].labels(**self._labels).set(value)
        if "loss" in metrics:
            self._step.set(step)

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()
