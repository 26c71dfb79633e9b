"""What reaches the user's terminal: unipar's own words, and not Colossal-AI's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("colossalai_small_run.py")

pytestmark = pytest.mark.slow


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=150
    )


@pytest.mark.thorough
@pytest.mark.parametrize("plugin", ["gemini", "ddp", "zero2", "fsdp"])
@pytest.mark.usefixtures("new_interpreters")
def test_a_run_prints_nothing_of_the_frameworks(plugin: str) -> None:
    done = run(plugin, "warning")
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("steps: 6\n", "")


@pytest.mark.thorough
@pytest.mark.usefixtures("new_interpreters")
def test_debug_shows_what_the_framework_says() -> None:
    done = run("zero2", "debug")
    assert done.returncode == 0, done.stderr
    assert "tensornvme" in done.stdout + done.stderr


@pytest.mark.thorough
def test_a_rank_that_is_killed_ends_the_run_with_a_report(tmp_path: Path) -> None:
    done = run("zero2", "warning", str(tmp_path))
    assert done.returncode != 0
    assert "Rank 1 of 2 failed" in done.stderr
    assert "SIGKILL" in done.stderr


def test_a_run_goes_on_from_its_checkpoint_after_a_rank_was_killed(tmp_path: Path) -> None:
    done = run("zero2", "error", str(tmp_path), "1")
    assert (tmp_path / "killed").exists()
    assert done.returncode == 0, done.stderr
    assert done.stdout == "steps: 6\n"
