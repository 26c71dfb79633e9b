"""``unipar bench`` as a user runs it: its table and files, and Ctrl-C in the middle."""

from __future__ import annotations

import csv
import io
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from unipar.benchmark.result import BenchResult

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]

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
    out, problem = start(directory, *flags, "--format", "csv").communicate(timeout=300)
    (row,) = csv.DictReader(io.StringIO(out))
    assert (row["strategy"], row["status"]) == ("single", "measured")
    assert "single on 1: done" in problem
    assert f"Report: {Path('out', 'report.html')}" in problem
    result = BenchResult.load(directory / "out")
    assert result.job.model == "Linear"
    assert result.job.command.startswith("unipar bench run.yaml --output out")
    # A benchmark trains, and leaves no checkpoints of it.
    assert not list(directory.rglob("checkpoints"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
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
    if number is signal.SIGINT:
        assert process.returncode == 130, problem
        assert "interrupted" in problem
        assert f"Report: {Path('out', 'report.html')}" in problem
        statuses = [one.status for one in BenchResult.load(directory / "out").cells]
        assert statuses == ["not run", "not run"]
