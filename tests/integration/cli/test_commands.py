"""The command line as a user meets it: real processes, exit codes, and what is printed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from unipar.cli import main

JOB = """
import torch
from torch import nn


def build(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))


def data():
    return torch.randn(64, 4, generator=torch.Generator().manual_seed(1))


def loss(model, batch):
    return model(batch).square().mean()


class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        import time

        time.sleep(0.02)
        return torch.ones(4)
"""

RUN = """
model: {target: "job:build", width: 16}
data: job:data
loss: job:loss
optimizer: {name: sgd, lr: 0.1}
global_batch_size: 16
steps: 3
output_dir: out
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def unipar(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "unipar", *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


def in_this_process(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For ``main``, what a process of its own would start with; that takes seconds to import."""
    monkeypatch.chdir(job)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.syspath_prepend(str(job))
    monkeypatch.delitem(sys.modules, "job", raising=False)


def test_train_runs_the_file_on_two_processes(job: Path) -> None:
    done = unipar("train", "run.yaml", "--strategy", "ddp", "--devices", "2", cwd=job)
    assert done.returncode == 0, done.stderr
    assert "ddp on 2 x cpu" in done.stderr
    assert (job / "out/checkpoints/step-00000003").is_dir()
    assert yaml.safe_load((job / "out/config.yaml").read_text())["global_batch_size"] == 16


def test_file_then_environment_then_flags(
    job: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    in_this_process(job, monkeypatch)

    def resolved(*flags: str) -> dict[str, object]:
        assert main(["train", "run.yaml", "--dry-run", *flags]) == 0
        return yaml.safe_load(capfd.readouterr().out)

    assert resolved()["steps"] == 3
    assert resolved("--set", "optimizer.lr=0.5")["optimizer"] == {"name": "sgd", "lr": 0.5}
    monkeypatch.setenv("UNIPAR_STEPS", "5")
    assert resolved()["steps"] == 5
    assert resolved("--steps", "7")["steps"] == 7
    assert resolved("--set", "steps=9")["steps"] == 9
    assert not (job / "out").exists()


@pytest.mark.parametrize(
    ("given", "shares", "samples"),
    [("[3, 2]", [3.0, 2.0], "10, 6"), ("auto", "auto", "to be found")],
)
def test_a_dry_run_says_what_each_rank_takes(
    given: str,
    shares: Any,
    samples: str,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    in_this_process(job, monkeypatch)
    flags = ("--strategy", "ddp", "--devices", "2", "--set", f"shares={given}")
    assert main(["train", "run.yaml", "--dry-run", *flags]) == 0
    said = capfd.readouterr()
    assert yaml.safe_load(said.out)["shares"] == shares
    assert re.search(rf"samples of each rank\W+{samples}\b", said.out)


def test_what_a_dry_run_prints_is_a_run_file(job: Path) -> None:
    first = unipar("train", "run.yaml", "--dry-run", "--steps", "2", cwd=job)
    (job / "again.yaml").write_text(first.stdout)
    second = unipar("train", "again.yaml", cwd=job)
    assert second.returncode == 0, second.stderr
    assert (job / "out/checkpoints/step-00000002").is_dir()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stepz: 4\n", ["run.yaml", "stepz", "steps"]),
        ("precision: fp4\n", ["run.yaml", "precision", "bf16"]),
        ("strategy: ddq\n", ["ddq", "ddp"]),
        ("model: job:biuld\n", ["biuld", "build"]),
        ("model: [1, 2\n", ["run.yaml", "line"]),
    ],
)
def test_mistakes_in_a_file_are_shown_where_they_are(
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    text: str,
    says: list[str],
) -> None:
    in_this_process(job, monkeypatch)
    key = text.split(":")[0]
    kept = [line for line in RUN.splitlines() if not line.startswith(key + ":")]
    (job / "run.yaml").write_text("\n".join(kept) + "\n" + text)
    assert main(["train", "run.yaml"]) == 2
    told = capfd.readouterr().err
    for part in says:
        assert part in told
    assert "Traceback" not in told
    assert len(told.splitlines()) < 25
    assert not (job / "out").exists()


def test_toml_works_likewise(job: Path) -> None:
    (job / "run.toml").write_text(
        'model = "job:build"\ndata = "job:data"\nloss = "job:loss"\n'
        'global_batch_size = 16\nsteps = 1\noutput_dir = "out"\n'
    )
    done = unipar("train", "run.toml", "--quiet", cwd=job)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.thorough)],
)
def test_a_signal_saves_says_so_and_resumes(job: Path, number: signal.Signals, code: int) -> None:
    (job / "run.yaml").write_text(RUN.replace("job:data", "job:Slow").replace("3", "500"))
    process = subprocess.Popen(
        [sys.executable, "-m", "unipar", "train", "run.yaml"],
        cwd=job,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = job / "out/metrics.jsonl"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.1)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert "continue with resume='auto'" in said
    assert "Traceback" not in said
    (saved,) = (job / "out/checkpoints").iterdir()
    stopped_at = int(saved.name.removeprefix("step-"))
    more = unipar("train", "run.yaml", "--resume", "auto", "--steps", str(stopped_at + 2), cwd=job)
    assert more.returncode == 0, more.stderr
    assert f"resuming at step {stopped_at}" in more.stderr


def test_schema_describes_run_files(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    said = capfd.readouterr().out
    schema = json.loads(said)
    assert {"model", "data", "strategy", "steps", "checkpoint"} <= set(schema["properties"])
    assert "shard_optimizer" in said
    assert schema.get("additionalProperties") is False


def test_doctor_says_what_runs_and_what_would_mend_the_rest(
    capfd: pytest.CaptureFixture[str],
) -> None:
    done = unipar("doctor", cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    for word in ("Python", "torch", "cores", "memory", "Interconnect", "ddp", "fsdp", "single"):
        assert word in done.stdout
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert {"single", "ddp", "fsdp", "dp"} <= {entry["name"] for entry in told["strategies"]}


def test_convert_there_and_back(
    job: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    in_this_process(job, monkeypatch)
    assert main(["train", "run.yaml", "--quiet"]) == 0
    there = unipar("convert", "out/checkpoints", "exported", cwd=job)
    assert there.returncode == 0, there.stderr
    assert (job / "exported/model.safetensors").is_file()
    assert main(["convert", "exported", "returned"]) == 0
    capfd.readouterr()
    assert main(["convert", "out/checkpoints", "exported"]) == 2
    assert "not an empty directory" in capfd.readouterr().err
    code = (
        "import sys, job, torch, unipar\n"
        "a, b, c = (unipar.load_model(p, lambda: job.build(16)) for p in sys.argv[1:])\n"
        "same = [torch.equal(p, q) and torch.equal(p, r) for p, q, r in "
        "zip(a.parameters(), b.parameters(), c.parameters())]\n"
        "assert same == [True] * 4, same\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "out/checkpoints", "exported", "returned"],
        cwd=job,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("new_interpreters")
def test_help_and_version_do_not_import_torch() -> None:
    code = (
        "import sys\nfrom unipar.cli import main\n"
        "for flag in ('--help', '--version'):\n    assert main([flag]) == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "0.1.0" in done.stdout


def test_unknown_commands_and_flags_are_usage_errors(job: Path) -> None:
    assert unipar("trian", cwd=job).returncode == 2
    done = unipar("train", "run.yaml", "--quiet", "--verbose", cwd=job)
    assert done.returncode == 2
    assert "--quiet and --verbose" in done.stderr
