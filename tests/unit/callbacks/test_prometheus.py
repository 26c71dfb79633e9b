"""What Prometheus is given, over HTTP, while a run goes on."""

from __future__ import annotations

import math
import socket
import urllib.error
import urllib.request
from typing import Any

import pytest
import torch
from torch import nn

from unipar import Callback, fit
from unipar.callbacks import LoggerCallback
from unipar.callbacks.loggers.prometheus import PrometheusLogger
from unipar.errors import ConfigError

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://localhost:{port}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    values = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in values}


def test_a_scrape_during_a_run(tmp_path: Any, port: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", str(port))
    seen: dict[int, dict[str, float]] = {}

    class Scrape(Callback):
        def on_step_end(self, run: Any, record: Any) -> None:
            seen[record.step] = scrape(port) | {"now": record.loss}

    inputs = torch.randn(16, 4)
    result = fit(
        nn.Linear(4, 2),
        (inputs, inputs[:, 0].long() * 0),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        strategy="single",
        eval_data=(inputs, inputs[:, 0].long() * 0),
        eval_every=3,
        global_batch_size=4,
        steps=5,
        log_every=2,
        max_grad_norm=1.0,
        output_dir=tmp_path / "a run",
        loggers=["prometheus"],
        callbacks=[Scrape()],
        checkpoint=False,
        progress=False,
    )
    labels = '{run="a run",strategy="single"}'
    # Callbacks of the user's come before the loggers.
    assert seen[1][f"unipar_step{labels}"] == 0
    assert f"unipar_loss{labels}" not in seen[1]
    at = {name.removesuffix(labels): value for name, value in seen[5].items()}
    assert (at["unipar_step"], at["unipar_total_steps"]) == (4, 5)
    assert (at["unipar_world_size"], at["unipar_restarts"]) == (1, 0)
    assert at["unipar_loss"] == pytest.approx(result.losses[3])
    assert at["unipar_gradient_norm"] == pytest.approx(result.history[3].grad_norm)
    assert at["unipar_items_per_second"] > 0
    assert at["unipar_peak_memory_bytes"] > 0
    ((_, evaluated),) = [(n, v) for n, v in at.items() if n.startswith("unipar_evaluation{")]
    assert evaluated == pytest.approx(result.evaluations[0][1]["loss"])
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_a_loss_that_is_not_finite_is_shown(make_run: Any, make_record: Any, port: int):
    callback = LoggerCallback([PrometheusLogger(port=port)])
    callback.on_run_start(make_run(restart=2))
    callback.on_step_end(make_run(), make_record(1, loss=math.nan, grad_norm=None))
    found = {name.partition("{")[0]: value for name, value in scrape(port).items()}
    assert math.isnan(found["unipar_loss"])
    assert found["unipar_restarts"] == 2
    assert "unipar_gradient_norm" not in found
    callback.on_run_end(make_run(), None)


def test_a_port_that_is_in_use_is_refused(make_run: Any):
    with socket.create_server(("localhost", 0)) as server:
        taken = server.getsockname()[1]
        logger = PrometheusLogger(port=taken)
        with pytest.raises(ConfigError, match=rf"localhost:{taken}: Address already in use.+port"):
            logger.start(make_run())
        logger.close()


@pytest.mark.parametrize("asked", ["0", "70000", "http"])
def test_what_is_no_port(make_run: Any, monkeypatch: pytest.MonkeyPatch, asked: str):
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", asked)
    with pytest.raises(ConfigError, match=rf"PORT={asked} is no port"):
        PrometheusLogger().start(make_run())
