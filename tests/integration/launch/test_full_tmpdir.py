"""A temporary directory without room is named, and the variable that chooses another."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from torch import nn

from unipar import fit, launch
from unipar.errors import ConfigError

NAMED = r"file cannot be written: {why}\. The temporary directory is {directory}: make.* TMPDIR"


def test_no_temporary_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    monkeypatch.setattr(tempfile, "tempdir", str(gone))
    says = NAMED.format(why="No such file or directory", directory=gone)
    with pytest.raises(ConfigError, match=says):
        launch.run(print, devices=2)
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=says):
        fit(model, [1, 2], devices=2, device="cpu", global_batch_size=2, output_dir=tmp_path)


SCRIPT = """
import resource, signal, sys
from unipar import launch

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
sent, returned = bytes(int(sys.argv[1])), int(sys.argv[2])
try:
    launch.run(lambda placement: [sent, bytes(returned)], devices=1)
except Exception as error:
    print(type(error).__name__, error)
"""


# Its workers take on the limit that it sets.
@pytest.mark.usefixtures("new_interpreters")
@pytest.mark.parametrize(("sent", "returned"), [(200_000, 0), (0, 200_000)], ids=["sent", "back"])
def test_what_processes_are_sent_and_return_needs_room(
    tmp_path: Path, sent: int, returned: int
) -> None:
    # What the kernel says of a full disk is ENOSPC; of a file past its limit, EFBIG.
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(sent), str(returned)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        check=True,
    )
    assert done.stdout.startswith("ConfigError a temporary file cannot be written: File too large.")
    assert f"directory is {tmp_path}: make room in it" in done.stdout
    assert not list(tmp_path.glob("unipar*"))
