"""The examples run as they are, under more than one strategy, and learn something."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(name: str, *arguments: str, directory: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def number(pattern: str, text: str) -> float:
    found = re.findall(pattern, text)
    assert found, text
    return float(found[-1])


@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("single", "1"), pytest.param("fsdp", "2", marks=pytest.mark.thorough)],
)
def test_digits(strategy: str, devices: str, tmp_path: Path) -> None:
    said = run(
        "digits.py", "--strategy", strategy, "--devices", devices, "--epochs", "3",
        directory=tmp_path,
    )  # fmt: skip
    assert number(r"unseen digits: ([\d.]+)%", said) > 85


@pytest.mark.thorough
def test_gpt(tmp_path: Path) -> None:
    said = run("gpt.py", "--strategy", "ddp", "--devices", "2", "--steps", "15", directory=tmp_path)
    # A byte drawn evenly has ln 256 = 5.55 nats.
    assert number(r"evaluation loss ([\d.]+)", said) < 4.5


@pytest.mark.thorough
def test_hf_gpt2(tmp_path: Path) -> None:
    said = run(
        "hf_gpt2.py", "--strategy", "fsdp", "--devices", "2", "--steps", "12", directory=tmp_path
    )
    assert number(r"evaluation loss ([\d.]+)", said) < 4.5
    assert "it writes: 'def " in said


@pytest.mark.thorough
def test_own_loop_under_spawn_and_torchrun(tmp_path: Path) -> None:
    spawned = run("own_loop.py", "--strategy", "ddp", "--devices", "2", directory=tmp_path)
    assert number(r"accuracy ([\d.]+)%", spawned) > 85
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", str(EXAMPLES / "own_loop.py"), "--strategy", "ddp"),
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == spawned


@pytest.mark.thorough
def test_own_loop_goes_on_under_another_strategy(tmp_path: Path) -> None:
    run("own_loop.py", "--epochs", "2", directory=tmp_path)
    said = run(
        *("own_loop.py", "--strategy", "fsdp", "--devices", "2", "--epochs", "3", "--resume"),
        directory=tmp_path,
    )
    assert said.startswith("epoch 3: "), said
    assert "saved step-00000069" in said
    assert number(r"accuracy ([\d.]+)%", said) > 85


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("ddp", marks=pytest.mark.thorough)])
def test_gan_tells_real_digits_from_forged_ones(strategy: str, tmp_path: Path) -> None:
    said = run(
        "gan.py", "--strategy", strategy, "--devices", "2", "--epochs", "2", directory=tmp_path
    )
    # One that guesses has ln 2 = 0.69.
    assert 0.1 < number(r"epoch 1: discriminator ([\d.]+)", said) < 0.66
    assert len(said.partition("forged digits:\n")[2].splitlines()) == 8


def test_demo_finds_one_run_and_draws_it(tmp_path: Path) -> None:
    said = run("demo.py", "--steps", "8", "--plot", "curves.png", directory=tmp_path)
    under_ddp, under_fsdp = number(r"run: ([\d.e-]+)", said), number(r"([\d.e-]+) after", said)
    assert max(under_ddp, under_fsdp) < 1e-5
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert len(list((tmp_path / "runs").glob("demo-*/*/checkpoints/step-*"))) == 3
