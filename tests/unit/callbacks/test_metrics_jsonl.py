"""metrics.jsonl: there as soon as a step ends, valid whatever the values, each step once."""

from __future__ import annotations

import json
import math
import resource

import pytest

from unipar.callbacks import JSONLLogger, LoggerCallback, read_metrics
from unipar.errors import ConfigError


def train(callback, run, make_record, steps, evaluate_at=()):
    callback.on_run_start(run)
    for step in steps:
        callback.on_step_end(run, make_record(step))
        if step in evaluate_at:
            callback.on_evaluate_end(run, step, {"loss": 0.25, "accuracy": 0.75})


def test_rows_are_in_the_file_before_the_run_ends(make_run, make_record):
    run = make_run()
    train(LoggerCallback([JSONLLogger()]), run, make_record, [1, 2], evaluate_at=[2])
    rows = [json.loads(line) for line in (run.output_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [1, 2, 2]
    assert rows[0] == {
        "step": 1,
        "epoch": 0,
        "loss": 4.0,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "num_items": 640.0,
        "items_per_second": 64000.0,
        "seconds": 0.01,
        "peak_memory": 3 * 2**28,
    }
    assert rows[2] == {"step": 2, "eval/loss": 0.25, "eval/accuracy": 0.75}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_json_does_not_know_are_null(make_run, make_record, value):
    run = make_run()
    callback = LoggerCallback([JSONLLogger()])
    callback.on_run_start(run)
    callback.on_step_end(run, make_record(1, loss=value))
    callback.on_run_end(run, None)

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    line = (run.output_dir / "metrics.jsonl").read_text()
    row = json.loads(line, parse_constant=refuse)
    assert row["loss"] is None
    assert row["lr"] == 1e-3


def test_what_was_not_computed_is_left_out(make_run, make_record):
    run = make_run()
    callback = LoggerCallback([JSONLLogger()])
    callback.on_run_start(run)
    callback.on_step_end(run, make_record(1, grad_norm=None, lr=None, skipped=True))
    (row,) = read_metrics(run.output_dir / "metrics.jsonl")
    assert "grad_norm" not in row
    assert "lr" not in row
    assert row["skipped"] == 1


def test_resuming_leaves_each_step_once(make_run, make_record):
    first, again = make_run(), make_run(start_step=3)
    train(LoggerCallback([JSONLLogger()]), first, make_record, range(1, 6), evaluate_at=[3, 5])
    path = first.output_dir / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    train(LoggerCallback([JSONLLogger()]), again, make_record, range(4, 8), evaluate_at=[5])
    rows = read_metrics(path)
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6, 7]
    assert [row["step"] for row in rows if "eval/loss" in row] == [3, 5]
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_run_from_the_start_begins_the_file_anew(make_run, make_record):
    run = make_run()
    train(LoggerCallback([JSONLLogger()]), run, make_record, range(1, 6))
    train(LoggerCallback([JSONLLogger()]), run, make_record, range(1, 3))
    assert [row["step"] for row in read_metrics(run.output_dir / "metrics.jsonl")] == [1, 2]


def test_a_crash_while_resuming_keeps_the_old_rows(make_run, make_record, monkeypatch):
    run = make_run()
    train(LoggerCallback([JSONLLogger()]), run, make_record, range(1, 6))
    path = run.output_dir / "metrics.jsonl"
    before = path.read_text()

    def crash(descriptor):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", crash)
    with pytest.raises(ConfigError, match="no space"):
        JSONLLogger().start(make_run(start_step=2))
    assert path.read_text() == before


def test_only_some_steps_are_logged_if_asked(make_run, make_record):
    run = make_run(total_steps=25)
    train(LoggerCallback([JSONLLogger()], every=10), run, make_record, range(1, 26), [7])
    rows = read_metrics(run.output_dir / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 10, 20, 25]
    assert [row["step"] for row in rows if "eval/loss" in row] == [7]


def test_a_full_disk_is_named(make_run, make_record):
    run = make_run()
    callback = LoggerCallback([JSONLLogger()])
    callback.on_run_start(run)
    callback.on_step_end(run, make_record(1))
    path = run.output_dir / "metrics.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be written: .+ output_dir"):
            callback.on_step_end(run, make_record(2))
        callback.on_exception(run, ConfigError("the same"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [row["step"] for row in read_metrics(path)] == [1]
