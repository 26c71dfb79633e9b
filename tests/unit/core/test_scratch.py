"""Directories that a killed process leaves are removed by the next one, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from unipar.utils.scratch import PREFIX, scratch

MAKE = """
import sys, time
from pathlib import Path
from unipar.utils.scratch import scratch
with scratch(Path(sys.argv[1])) as directory:
    (directory / "payload.pkl").write_text("large")
    print(directory, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(tmp_path: Path):
    """Another process, within its block."""
    command = [sys.executable, "-c", MAKE, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process, Path(process.stdout.readline().strip())
    process.kill()
    process.communicate()


def test_it_is_private_and_goes_with_its_block(tmp_path: Path):
    with scratch(tmp_path) as directory:
        assert directory.parent == tmp_path
        assert directory.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_without_a_place_it_is_where_temporary_files_are(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with scratch() as directory:
        assert directory.parent == tmp_path


def test_what_a_killed_process_left_goes_and_what_a_living_one_has_stays(tmp_path: Path, other):
    process, theirs = other
    with scratch(tmp_path) as ours:
        assert {*tmp_path.iterdir()} == {ours, theirs}
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (theirs / "payload.pkl").exists()
    with scratch(tmp_path) as ours:
        assert [*tmp_path.iterdir()] == [ours]


def test_what_another_program_has_made_stays(tmp_path: Path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(target)
    (tmp_path / f"{PREFIX}file").touch()
    readable = tmp_path / f"{PREFIX}readable"
    readable.mkdir()
    os.chmod(readable, 0o755)
    (tmp_path / "unipar-other").mkdir(mode=0o700)
    before = {*tmp_path.iterdir()}
    with scratch(tmp_path):
        pass
    assert {*tmp_path.iterdir()} == before
    assert (target / "kept").exists()


@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to own a directory as another user")
def test_what_another_user_has_made_stays(tmp_path: Path):
    theirs = tmp_path / f"{PREFIX}theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 12345, 12345)
    with scratch(tmp_path):
        pass
    assert theirs.exists()
