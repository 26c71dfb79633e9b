"""What cannot be benchmarked is refused before anything is started."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar import ConfigError, WorkerError
from unipar.benchmark.api import bench
from unipar.benchmark.trial import explain

pytestmark = pytest.mark.usefixtures("forked_programs")

DATA = (torch.randn(32, 4), torch.randn(32, 1))


def refused(tmp_path: Path, **given: Any) -> str:
    output = tmp_path / "out"
    arguments: dict[str, Any] = {
        "strategies": ["ddp"],
        "steps": 5,
        "warmup": 2,
        "global_batch_size": 8,
        "output_dir": output,
        "loss": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    }
    with pytest.raises(ConfigError) as error:
        bench(nn.Linear(4, 1), DATA, **{**arguments, **given})
    assert not (output / "trials").exists()
    return str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steps": 1}, "steps=1 are timed after warmup=2"),
        ({"warmup": 0}, "warmup=0; give 1 or more"),
        ({"repeats": 0}, "repeats=0; give 1 or more"),
        ({"time_limit": 0}, "time_limit=0"),
        ({"strategies": []}, "strategies is empty"),
        ({"strategies": ["deepspeed:stage=1||2"]}, "Write a sweep like"),
        ({"global_batch_size": None}, "global_batch_size is not set"),
        ({"optimiser": "sgd"}, "no argument 'optimiser'. Did you mean 'optimizer'"),
        ({"max_grad_norm": -1}, "max_grad_norm"),
        ({"shares": [2, 1]}, "a benchmark takes no shares"),
    ],
)
def test_settings(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    assert message in refused(tmp_path, **given)


def test_a_strategy_that_nobody_has(tmp_path: Path) -> None:
    said = refused(tmp_path, strategies=["ddp", "fdsp"])
    assert "there is no strategy 'fdsp'" in said
    assert "Did you mean 'fsdp'" in said


def test_none_that_can_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    info = site / "absent-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: absent\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[unipar.strategies]\nabsent = absent_strategy:Absent\n")
    (site / "absent_strategy.py").write_text(
        "from unipar.strategy import Availability\n"
        "from unipar_torch.ddp import DDPStrategy\n"
        "class Absent(DDPStrategy):\n"
        "    name = 'absent'\n"
        "    @classmethod\n"
        "    def availability(cls):\n"
        "        return Availability(False, 'its engine is not installed.', 'Run: get engine.')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
    said = refused(tmp_path, strategies=["absent"])
    assert "none of the strategies can run here" in said
    assert "absent: its engine is not installed. Run: get engine." in said


def test_a_directory_with_something_else_in_it(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    assert "holds files that are no benchmark's" in refused(tmp_path)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = refused(tmp_path, output_dir=tmp_path / "file" / "out")
    assert "cannot be used" in said
    assert "--output" in said


def test_a_report_that_could_not_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    assert "pip install 'unipar[bench]'" in refused(tmp_path)


def test_a_python_that_does_not_work(tmp_path: Path) -> None:
    said = refused(tmp_path, pythons=[tmp_path / "no-python"])
    assert "no-python cannot take part in the benchmark" in said


def test_a_python_without_unipar(tmp_path: Path) -> None:
    bare = tmp_path / "bare-python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    said = refused(tmp_path, pythons=[bare])
    assert "No module named 'unipar'" in said
    # From where this one was installed, for no index has it.
    assert re.search(rf"{bare} -m pip install (file|git\+https)://\S+$", said)


def test_loops_that_are_not_there(tmp_path: Path) -> None:
    said = refused(tmp_path, raw=tmp_path)
    assert f"a loop for 'ddp' would be {tmp_path / 'ddp.py'}" in said


def test_under_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
    }.items():
        monkeypatch.setenv(name, value)
    assert "without torchrun" in refused(tmp_path)


def test_an_error_that_shows_the_whole_model_is_cut_to_its_first_line() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(50)))
    shown = explain(ValueError(f"containers are not supported: {model}"))
    rest = " … (the rest is in the trial's log.txt)"
    assert shown.reason == f"ValueError: containers are not supported: Sequential{rest}"
    long = explain(ValueError("x" * 5000))
    assert long.reason.startswith("ValueError: xxx")
    assert len(long.reason) < 500
    ours = "one line\nand what to do"
    assert explain(ConfigError(ours)).reason == ours
    assert explain(RuntimeError("no such thing")).reason == "RuntimeError: no such thing"


def test_a_failed_rank_is_named_without_its_traceback() -> None:
    said = "Rank 1 of 2 failed: KeyError: 3\n\nTraceback of rank 1:\n  here"
    failed = WorkerError(said, rank=1, worker_traceback="  here")
    assert explain(failed).reason.startswith("Rank 1 of 2 failed: KeyError: 3 … (the rest is in")
    killed = WorkerError("Rank 0 of 2 failed: killed by SIGKILL\nIf memory ran out, use less.")
    assert explain(killed).reason == str(killed)
