"""What runs leave for those who watch them: events, and ranks that are named as slow."""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from small_run import STEPS, build, data, fit_in_world, loss_fn, settings

from unipar import Callback, RunResult, fit
from unipar.errors import Terminated, WorkerError
from unipar.testing.pool import WorldPools
from unipar.train import stragglers
from unipar.train.events import EventLog
from unipar.train.watching.runs import read_run
from unipar.world import Placement, processes

Run = Callable[..., RunResult]


def events(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]


class At(Callback):
    """Calls something after step 3."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def on_step_end(self, run: Any, record: Any) -> None:
        if record.step == 3:
            self.act()


def fail() -> None:
    raise ValueError("it broke\nin two lines")


def test_starts_checkpoints_and_ends_are_kept_over_resumes(run: Run, tmp_path: Path):
    directory = tmp_path / "run"
    # Step 2's is announced before step 3 breaks.
    changes = {"checkpoint": {"every_steps": 2, "async": False}, "resume": "auto"}
    seen = []

    def look() -> None:
        seen.append(read_run(directory))
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(ValueError, match="it broke"):
        run(callbacks=[At(fail)], **changes)
    (directory / "events.jsonl").open("a").write('{"event": "cut')
    with pytest.raises(Terminated):
        run(callbacks=[At(look)], **changes)
    assert (seen[0].state, seen[0].starts) == ("running", 2)
    stopped = read_run(directory)
    assert (stopped.state, stopped.why, stopped.step) == ("interrupted", "SIGTERM", 3)
    run(strategy="ddp", **changes)
    lines = (directory / "events.jsonl").read_text().splitlines()
    assert lines.pop(3) == '{"event": "cut'
    rows = [json.loads(line) for line in lines]
    assert [(row["event"], row["step"]) for row in rows] == [
        ("started", 0), ("saved", 2), ("ended", 3),
        ("started", 2), ("ended", 3),
        ("started", 3), ("saved", 4), ("saved", 6), ("ended", 6),
    ]  # fmt: skip
    assert {row["format"] for row in rows} == {1}
    assert rows[2]["error"] == "ValueError: it broke"
    assert [rows[at]["how"] for at in (2, 4, 8)] == ["failed", "interrupted", "finished"]
    assert rows[0]["strategy"] == "single"
    assert (rows[5]["strategy"], rows[5]["world_size"], rows[5]["total_steps"]) == ("ddp", 1, 6)
    found = read_run(directory)
    assert (found.state, found.starts, found.loss is None) == ("finished", 3, False)


def test_a_run_that_fails_before_its_first_step_says_why(run: Run, tmp_path: Path):
    with pytest.raises(ValueError, match="it broke"):
        run(fail)
    found = read_run(tmp_path / "run")
    assert (found.state, found.why) == ("failed", "ValueError: it broke")


def kill_rank_0(model: Any, batch: Any) -> Any:
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return loss_fn(model, batch)


def test_a_killed_rank_0_is_no_run_that_was_lost(tmp_path: Path):
    with pytest.raises(WorkerError):
        fit(build(), data(), **settings(tmp_path, strategy="ddp", devices=2, loss=kill_rank_0))
    started, ended = events(tmp_path)
    assert (started["world_size"], started["launcher"], len(started["hosts"])) == (2, "local", 1)
    found = read_run(tmp_path)
    assert found.state == "failed"
    assert found.why == ended["error"]
    assert "Rank 0" in ended["error"]


def test_a_full_disk_ends_no_run_that_trains(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """No file grows beyond the one with the events, which is the longest by far."""
    path = tmp_path / "run" / "events.jsonl"
    path.parent.mkdir()
    path.write_text("\n" * 50_000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, before[1]))
    try:
        result = run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(result.losses) == STEPS
    (said,) = [one.getMessage() for one in caplog.records if one.name == "unipar"]
    assert "events.jsonl cannot be written: File too large. The run goes on" in said
    assert read_run(path.parent).state == "unknown"


def test_what_is_no_file_ends_no_run(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "run" / "events.jsonl"
    path.parent.mkdir()
    os.mkfifo(path)
    assert len(run().losses) == STEPS
    assert "events.jsonl cannot be written: it is not a file" in caplog.text


def test_an_error_that_another_rank_has_caused_is_said_to_be_one(tmp_path: Path):
    EventLog(tmp_path).failed(RuntimeError("[a/gloo/b.cc:1] Connection closed by peer"), step=3)
    (row,) = events(tmp_path)
    assert row["error"].startswith("another rank failed first, by which: RuntimeError: [a/gloo")


def trained_unevenly(placement: Placement, directory: Path, slow_until: int) -> list[str]:
    """By the clock both ranks take 10 ms before they reduce; rank 1 takes 50 ms at first.

    The clock is moved by hand, for on a busy machine either rank may be kept from its processor.
    """
    said: list[str] = []
    calls, now = 0, 1.0

    def loss(model: Any, batch: Any) -> Any:
        nonlocal calls, now
        calls += 1
        now += 0.05 if placement.rank == 1 and calls <= slow_until else 0.01
        return loss_fn(model, batch)

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Kept()
    logging.getLogger("unipar").addHandler(handler)
    clock = SimpleNamespace(perf_counter=lambda: now, sleep=time.sleep)
    try:
        with (
            # Looked at after each step.
            mock.patch.object(stragglers, "EVERY", 0.0),
            mock.patch.object(stragglers, "time", clock),
            mock.patch.object(processes, "time", clock),
        ):
            fit_in_world(placement, directory, strategy="ddp", loss=loss, steps=200)
    finally:
        logging.getLogger("unipar").removeHandler(handler)
    return said


def test_a_slow_rank_is_named_once_and_when_it_has_recovered(
    world_pool: WorldPools, tmp_path: Path
):
    on_0, on_1 = world_pool(2).run(trained_unevenly, tmp_path, 100)
    slow, recovered = on_0
    host = os.uname().nodename
    assert f"rank 1 on {host} keeps the others waiting: in each of 20 steps" in slow
    assert recovered == f"rank 1 on {host} is as fast as the others again"
    assert on_1 == []
    rows = [row for row in events(tmp_path) if "rank" in row]
    assert [(row["event"], row["rank"], row["host"]) for row in rows] == [
        ("slow", 1, host),
        ("recovered", 1, host),
    ]


def test_even_ranks_are_not_named(world_pool: WorldPools, tmp_path: Path):
    assert world_pool(2).run(trained_unevenly, tmp_path, 0) == [[], []]
