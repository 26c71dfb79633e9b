"""The example that runs one script under every strategy there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SWITCH = Path(__file__).resolve().parents[3] / "examples" / "switch.py"


def switch(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SWITCH), "--steps", "6", *arguments],
        cwd=directory,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=280,
    )


def python_that(directory: Path, does: str) -> Path:
    """The interpreter of another environment, as far as anybody can tell."""
    other = directory / "python"
    other.write_text(f"#!/bin/sh\n{does}\n")
    other.chmod(0o755)
    return other


@pytest.mark.thorough
def test_strategies_lie_on_one_curve_and_the_rest_say_why_not(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    other = python_that(elsewhere, f'touch "{elsewhere}/asked"; exec "{sys.executable}" "$@"')
    flags = ("--python", str(other), "--plot", "curves.png")
    done = switch(tmp_path, "ddp", "fsdp", "nothing-like-it", *flags)
    assert done.returncode == 0, done.stderr
    assert (elsewhere / "asked").exists()
    rows = re.findall(r"│ (\w+) +│ +([\d.]+) │ +([\d.e-]*) +│", done.stdout)
    assert [name for name, *_ in rows] == ["single", "ddp", "fsdp"], done.stdout
    assert all(float(difference) < 1e-5 for _, _, difference in rows[1:])
    assert "nothing-like-it did not run. there is no strategy 'nothing-like-it'" in done.stdout
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert os.listdir(tmp_path) == ["curves.png"]


def test_a_run_that_breaks_is_not_passed_over(tmp_path: Path) -> None:
    other = python_that(tmp_path, "echo it is broken >&2; exit 3")
    done = switch(tmp_path, "nothing-like-it", "--python", str(other), "--plot", "curves.png")
    assert done.returncode == 1
    assert f"nothing-like-it, by {other}, failed:\nit is broken" in done.stderr
