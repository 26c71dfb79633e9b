"""What may be skipped, and where: conftest.py at the root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TESTS = """
import pytest

@pytest.mark.skipif(True, reason="there is no mpirun")
def test_marked(): pass

def test_called(): pytest.skip("there is no browser")

@pytest.mark.gpu
@pytest.mark.skipif(True, reason="there is no GPU")
def test_gpu(): pass

@pytest.mark.xfail
def test_known(): assert False
"""


@pytest.mark.parametrize(
    ("ci", "counts"),
    [("true", "1 failed, 1 skipped, 1 xfailed, 1 error"), ("", "3 skipped, 1 xfailed")],
)
def test_where_ci_is_true_what_is_skipped_has_failed(tmp_path: Path, ci: str, counts: str) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "test_some.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_some.py"],
        cwd=tmp_path,
        env={**os.environ, "CI": ci},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert counts in done.stdout, done.stdout + done.stderr
    for reason in ("there is no mpirun", "there is no browser"):
        assert reason in done.stdout
