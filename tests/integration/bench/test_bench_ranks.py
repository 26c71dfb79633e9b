"""The ranks of a trial have torch in memory when they start, and nothing of the trial before."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from unipar.benchmark.cells import Cell
from unipar.benchmark.job import BenchJob
from unipar.benchmark.server import Forked, Server
from unipar.benchmark.store import Finding
from unipar.testing import programs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

BALLAST = 256 * 2**20
RANKS = 2
DATA = torch.zeros(16, 4)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    # Its ranks are known by its command, which a forked program has not.
    with programs.new_interpreters(), contextlib.closing(Server(sys.executable)) as made:
        yield made


class Awaited:
    """Data that a process cannot read before there is a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        def read(file: Path) -> torch.Tensor:
            while not file.exists():
                time.sleep(0.02)
            return DATA

        return read, (self.file,)


def start(
    server: Server, directory: Path, model: Any, strategy: str = "ddp", data: Any = DATA
) -> Forked:
    """A trial in a directory of its own; each of its ranks makes the model."""
    directory.mkdir()
    arguments: dict[str, Any] = {
        "model": model,
        "data": data,
        "loss": lambda model, batch: model(batch).square().mean(),
        "optimizer": {"name": "sgd", "lr": 0.1},
        "global_batch_size": 4,
    }
    job = directory / "job.pkl"
    BenchJob(arguments, warmup=1, steps=2).write(job)
    cell = Cell(strategy=strategy, devices=RANKS).model_dump()
    request = {"cell": cell, "kind": "measure", "repeat": 0, "trace": False, "began": time.time()}
    (directory / "request.json").write_text(json.dumps(request))
    with (directory / "log.txt").open("wb") as log:
        return server.start(job, directory, processes=RANKS, threads=1, log=log.fileno())


def children(trial: Forked) -> list[int]:
    deadline = time.monotonic() + 60
    while len(found := psutil.Process(trial.pid).children()) < RANKS:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [one.pid for one in found]


def test_ranks_are_forked_from_the_server_and_new_ones_in_each_trial(
    server: Server, tmp_path: Path
) -> None:
    peaks: list[list[int]] = []
    for ballast in (BALLAST, 0):
        seen = tmp_path / f"seen-{ballast}"
        seen.mkdir()

        def model(ballast: int = ballast, seen: Path = seen) -> nn.Module:
            rank = psutil.Process()
            told = {"command": rank.cmdline(), "left": "ballast" in sys.modules}
            (seen / str(rank.pid)).write_text(json.dumps(told))
            sys.modules["ballast"] = torch
            bytearray(b"\1" * ballast)
            return nn.Linear(4, 1)

        directory = tmp_path / str(ballast)
        trial = start(server, directory, model)
        assert trial.wait(120) == 0, (directory / "log.txt").read_text()
        told = [json.loads(file.read_text()) for file in seen.iterdir()]
        assert len(told) == RANKS
        for one in told:
            # A new interpreter would have the command of a worker.
            assert "unipar.benchmark" in one["command"]
            assert not one["left"]
        finding = Finding.model_validate_json((directory / "answer.json").read_text())
        assert [rank.threads for rank in finding.trial.ranks] == [1] * RANKS
        memory = [rank.memory for rank in finding.trial.ranks]
        peaks.append([one.peak for one in memory if one])
    for heavy, light in zip(*peaks, strict=True):
        assert heavy - light > 0.9 * BALLAST


def test_ranks_end_with_a_trial_that_does_not_start_them_and_with_the_server(
    server: Server, tmp_path: Path, still_running
) -> None:
    seen = tmp_path / "seen"
    refused = start(server, tmp_path / "refused", nn.Linear(4, 1), "single", Awaited(seen))
    waiting = children(refused)
    seen.touch()
    assert refused.wait(60) == 1
    assert "single" in (tmp_path / "refused" / "failure.json").read_text()
    assert still_running(waiting) == []

    begun = tmp_path / "begun"

    def never() -> nn.Module:
        begun.touch()
        time.sleep(3600)
        raise AssertionError

    trial = start(server, tmp_path / "trial", never)
    ranks = children(trial)
    deadline = time.monotonic() + 60
    while not begun.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    parent = psutil.Process(trial.pid).parent()
    assert parent is not None
    assert parent.pid != os.getpid()
    parent.kill()
    assert still_running([trial.pid, *ranks]) == []
