"""Loggers by name, and what each tracker is left with."""

from __future__ import annotations

import os
import pickle
from importlib.util import find_spec

import pytest

from unipar.callbacks import JSONLLogger, Logger, LoggerCallback, resolve_loggers
from unipar.callbacks.loggers import LOGGERS
from unipar.callbacks.loggers.base import flat_config
from unipar.errors import ConfigError


class Recorder(Logger):
    def __init__(self):
        self.events = []

    def start(self, run):
        self.events.append("start")

    def log(self, metrics, step):
        self.events.append((step, dict(metrics)))

    def close(self):
        self.events.append("close")


def needs(package):
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed here")


def test_metrics_jsonl_is_always_written():
    assert [type(logger) for logger in resolve_loggers()] == [JSONLLogger]
    own = Recorder()
    assert [type(logger) for logger in resolve_loggers([own])] == [JSONLLogger, Recorder]
    assert len(resolve_loggers(["jsonl"])) == 1


def test_an_unknown_name_shows_the_nearest():
    with pytest.raises(ConfigError, match=r"'tensorbord'.* Did you mean 'tensorboard'"):
        resolve_loggers(["tensorbord"])


@pytest.mark.parametrize("given", ["tensorboard", Recorder()])
def test_one_logger_without_a_list(given):
    with pytest.raises(ConfigError, match="must be a list"):
        resolve_loggers(given)


def test_something_else():
    with pytest.raises(ConfigError, match="a logger is 3; give a name"):
        resolve_loggers([3])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio", "prometheus"])
def test_a_missing_package_is_said_before_the_run(name, monkeypatch):
    monkeypatch.setattr("unipar.callbacks.loggers.base.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"pip install 'unipar\[{name}\]'"):
        resolve_loggers([name])


def test_loggers_can_be_sent_to_a_worker(monkeypatch):
    monkeypatch.setattr("unipar.callbacks.loggers.base.find_spec", lambda package: True)
    loggers = resolve_loggers(list(LOGGERS))
    sent = pickle.loads(pickle.dumps(loggers))
    assert [type(logger) for logger in sent] == [type(logger) for logger in loggers]


def test_a_logger_is_closed_once(make_run, make_record):
    run, logger = make_run(), Recorder()
    callback = LoggerCallback([logger])
    callback.on_run_start(run)
    callback.on_step_end(run, make_record(1))
    callback.on_evaluate_end(run, 1, {"accuracy": 1})
    callback.on_exception(run, RuntimeError("boom"))
    callback.on_run_end(run, None)
    assert logger.events[0] == "start"
    assert logger.events[1][0] == 1
    assert logger.events[2:] == [(1, {"eval/accuracy": 1.0}), "close"]


def test_flat_config():
    config = {"a": 1, "b": {"c": {"d": 2}, "e": [3]}}
    assert flat_config(config) == {"a": 1, "b.c.d": 2, "b.e": [3]}


def two_attempts(name, make_run, make_record):
    """Steps 1 to 4 of which the last is lost, then 4 and 5 again."""
    for start, steps in ((0, range(1, 5)), (3, range(4, 6))):
        run = make_run(start_step=start)
        callback = LoggerCallback(resolve_loggers([name]))
        callback.on_run_start(run)
        for step in steps:
            callback.on_step_end(run, make_record(step, loss=step + start / 10))
        callback.on_evaluate_end(run, steps[-1], {"accuracy": 0.5})
        if start == 0:
            callback.on_exception(run, RuntimeError("boom"))
        callback.on_run_end(run, None)
    return run.output_dir


def test_tensorboard(make_run, make_record):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    output = two_attempts("tensorboard", make_run, make_record)
    events = accumulator.EventAccumulator(str(output / "tensorboard")).Reload()
    losses = {event.step: event.value for event in events.Scalars("loss")}
    assert losses == pytest.approx({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.3, 5: 5.3})
    assert len(events.Scalars("loss")) == 5
    assert [event.step for event in events.Scalars("eval/accuracy")] == [5]
    assert "config/text_summary" in events.Tags()["tensors"]


@pytest.mark.extra
@needs("wandb")
@pytest.mark.timeout(120)
def test_wandb(make_run, make_record, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    output = two_attempts("wandb", make_run, make_record)
    run_id = (output / ".wandb-run").read_text()
    attempts = list((output / "wandb").glob(f"offline-run-*-{run_id}"))
    assert attempts
    assert all(list(attempt.glob("*.wandb")) for attempt in attempts)


@pytest.mark.extra
@needs("mlflow")
@pytest.mark.timeout(120)
def test_mlflow(make_run, make_record, monkeypatch, tmp_path):
    from importlib import import_module

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    output = two_attempts("mlflow", make_run, make_record)
    client = import_module("mlflow").MlflowClient(uri)
    run_id = (output / ".mlflow-run").read_text()
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["checkpoint.keep_last"] == "3"
    assert run.data.metrics["eval/accuracy"] == 0.5
    history = {metric.step: metric.value for metric in client.get_metric_history(run_id, "loss")}
    assert set(history) == {1, 2, 3, 4, 5}
    assert history[5] == pytest.approx(5.3)


@pytest.mark.extra
@needs("trackio")
@pytest.mark.timeout(120)
def test_trackio(make_run, make_record, monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    two_attempts("trackio", make_run, make_record)
    assert any(os.scandir(tmp_path / "trackio"))
