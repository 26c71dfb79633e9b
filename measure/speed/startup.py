"""From the call of ``fit(devices=2)`` to the end of the first step, beside ``torchrun``."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measure.report import Row, whole_seconds
from measure.speed.timing import in_turns

HERE = Path(__file__).resolve().parent
CALL, SCRIPT, TORCHRUN = "call", "script", "torchrun"


def measure(*, quick: bool) -> list[Row]:
    """Both scripts do the same; the call's own time leaves out what its script imports before."""
    turns = 1 if quick else 9
    calls: list[float] = []

    def fit() -> float:
        called, whole = _run_fit()
        calls.append(called)
        return whole

    measured = in_turns({SCRIPT: fit, TORCHRUN: _run_torchrun}, turns)
    beside = "to the first step done, beside `torchrun` of a hand-written script, 2 processes"
    plain = measured[TORCHRUN]
    return [
        Row.timed(f"from calling `fit` {beside}", calls, plain, whole_seconds, 1.2),
        Row.timed(f"from starting the script {beside}", measured[SCRIPT], plain, whole_seconds),
    ]


def _run_fit() -> tuple[float, float]:
    """Seconds from the call, and from the start of the script that makes it."""
    started, lines = _run([sys.executable, str(HERE / "start_fit.py")])
    called, done = float(lines[0]), float(lines[1])
    return done - called, done - started


def _run_torchrun() -> float:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    started, lines = _run([*command, "--nproc-per-node=2", str(HERE / "start_plain.py")])
    return float(lines[0]) - started


def _run(command: list[str]) -> tuple[float, list[str]]:
    """When a script was started, and the times that it wrote down."""
    with tempfile.TemporaryDirectory() as directory:
        times = Path(directory) / "times"
        started = time.time()
        done = subprocess.run(
            [*command, str(times)], cwd=directory, capture_output=True, text=True, timeout=180
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        return started, times.read_text().split()
