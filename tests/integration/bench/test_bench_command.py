"""``unipar bench`` as a user runs it: its table and files, and Ctrl-C in the middle."""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from unipar.benchmark.load import BUSY
from unipar.benchmark.machine import cores
from unipar.benchmark.result import BenchResult

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]

JOB = """
import torch
from torch import nn


def build():
    return nn.Linear(4, 1)


def data():
    return torch.randn(64, 4, generator=torch.Generator().manual_seed(1))


def loss(model, batch):
    return model(batch).square().mean()
"""

RUN = """
model: job:build
data: job:data
loss: job:loss
optimizer: {name: sgd, lr: 0.1}
global_batch_size: 16
checkpoint: {every_steps: 1}
epochs: 1
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def start(directory: Path, *flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "unipar", "bench", "run.yaml", "--output", "out", *flags]
    return subprocess.Popen(
        command, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_one_repeat_gives_a_table_and_two_files(directory: Path) -> None:
    # A batch of one cannot be divided to see what rounding does.
    (directory / "run.yaml").write_text(RUN.replace("16", "1"))
    flags = ("--strategies", "single", "--steps", "3", "--warmup", "1", "--repeats", "1")
    process = start(directory, *flags, "--format", "csv", "--trace")
    out, problem = process.communicate(timeout=300)
    (row,) = csv.DictReader(io.StringIO(out))
    assert (row["strategy"], row["status"]) == ("single", "measured")
    assert "single on 1: done" in problem
    assert f"Report: {Path('out', 'report.html')}" in problem
    result = BenchResult.load(directory / "out")
    assert result.job.model == "Linear"
    assert result.job.command.startswith("unipar bench run.yaml --output out")
    assert "model: job:build" in result.job.run_file
    assert "0 of 3, at least " in problem
    assert (directory / "out" / "table.csv").read_text() == out
    (trace,) = result.cells[0].traces
    assert json.loads(gzip.decompress((directory / "out" / trace).read_bytes()))["traceEvents"]
    assert trace in (directory / "out" / "report.html").read_text()
    # A benchmark trains, and leaves no checkpoints of it.
    assert not list(directory.rglob("checkpoints"))


@contextlib.contextmanager
def busy() -> Iterator[None]:
    """Other processes have more of the cores than a measurement bears, and no more than that."""
    number = int(cores() * BUSY) + 1
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.thorough
def test_beside_busy_processes_no_winner_is_named_and_less_does_not_replace_more(
    directory: Path,
) -> None:
    (directory / "run.yaml").write_text(RUN.replace("16", "1"))
    # As many steps as last for longer than the system's clock is coarse.
    flags = ("--devices", "1", "--steps", "600", "--warmup", "1")
    equals = ["ddp", "ddp:bucket_cap_mb=20"]
    process = start(directory, *flags, "--strategies", ",".join(equals), "--repeats", "3")
    with busy():
        out, problem = process.communicate(timeout=380)
    assert process.returncode == 0, problem
    said = " ".join(out.split())
    assert "Too noisy to name a winner: " in said
    assert re.search(r"other processes had up to \d+ % of the cores meanwhile", said)
    assert "End what else runs on this machine, and run it again" in said
    assert "Pick" not in said
    result = BenchResult.load(directory / "out")
    assert result.winner is None
    assert all(one.load is not None and one.load > BUSY for one in result.cells)

    # Asked for less in the same place, and for one that cannot run.
    process = start(directory, *flags, "--strategies", "ddp,dp", "--repeats", "1")
    out, problem = process.communicate(timeout=200)
    assert process.returncode == 1
    assert "unipar: dp on 1 device: refused." in problem
    again = BenchResult.load(directory / "out")
    assert [one.cell.strategy for one in again.cells] == [*equals, "dp"]
    assert again.cells[:2] == result.cells
    assert again.job.repeats == 3


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.thorough),
        signal.SIGKILL,
    ],
)
def test_ending_it_leaves_no_process_and_an_interrupt_leaves_a_report(
    directory: Path, number: signal.Signals, still_running
) -> None:
    process = start(
        directory,
        *("--strategies", "single,ddp", "--devices", "1"),
        *("--steps", "100000", "--warmup", "1", "--repeats", "1"),
    )
    first = directory / "out" / "trials" / "single--1x--fp32" / "0" / "run" / "config.yaml"
    deadline = time.monotonic() + 240
    while not first.exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    family = [one.pid for one in psutil.Process(process.pid).children(recursive=True)]
    assert family
    process.send_signal(number)
    _, problem = process.communicate(timeout=120)
    assert still_running(family) == []
    if number is signal.SIGKILL:
        return
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143}
    words = {signal.SIGINT: "it was interrupted", signal.SIGTERM: "it was ended by SIGTERM"}
    assert process.returncode == codes[number], problem
    assert f"Report: {Path('out', 'report.html')}" in problem
    result = BenchResult.load(directory / "out")
    assert [one.status for one in result.cells] == ["not run", "not run"]
    assert result.interrupted == words[number]
    told = f"Not complete: {words[number]} after 0 of 2 trials."
    assert told in (directory / "out" / "report.html").read_text()
    assert told in (directory / "out" / "table.md").read_text()
