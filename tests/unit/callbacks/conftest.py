"""A run, and steps of it, as the loop would describe them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from unipar.callbacks import RunInfo, StepRecord


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunInfo]:
    def make(**changes) -> RunInfo:
        values = {
            "strategy": "ddp",
            "world_size": 2,
            "device": "cpu",
            "total_steps": 100,
            "epochs": 2,
            "global_batch_size": 64,
            "num_parameters": 1_234_567,
            "output_dir": tmp_path / "run",
            "config": {"seed": 7, "checkpoint": {"keep_last": 3}},
        }
        return RunInfo(**(values | changes))

    return make


@pytest.fixture
def make_record() -> Callable[..., StepRecord]:
    def make(step: int, **changes) -> StepRecord:
        values = {
            "step": step,
            "epoch": (step - 1) // 50,
            "loss": 4.0 / step,
            "grad_norm": 0.5,
            "lr": 1e-3,
            "num_items": 640.0,
            "num_samples": 64,
            "seconds": 0.01,
            "peak_memory": 3 * 2**28,
        }
        return StepRecord(**(values | changes))

    return make
