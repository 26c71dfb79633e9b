"""A proof that is ended from outside takes all with it that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import psutil
import pytest

from unipar.utils.scratch import scratch

PROOF = """
import sys
from pathlib import Path
from unipar.migrate.launchers import command
from unipar.migrate.verify import losses_of
from unipar.utils.signals import terminations_raised
with terminations_raised():
    losses_of(Path(sys.argv[1]), "train.py", {}, command("torchrun", 2))
"""
TRAIN = """
import os, subprocess, sys, time
{imports}
# As a compiler that a framework calls.
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open(os.path.join({where!r}, "training-" + os.environ["RANK"]), "w").close()
time.sleep(600)
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("number", "imports"),
    [
        (signal.SIGTERM, ""),
        pytest.param(signal.SIGKILL, "import torch", marks=pytest.mark.thorough),
    ],
)
def test_nothing_is_left(
    number: signal.Signals,
    imports: str,
    tmp_path: Path,
    still_running: Callable[[Iterable[int]], list[int]],
):
    root, place = tmp_path / "program", tmp_path / "scratch"
    root.mkdir()
    place.mkdir()
    (root / "train.py").write_text(TRAIN.format(imports=imports, where=str(tmp_path)))
    process = subprocess.Popen(
        [sys.executable, "-c", PROOF, str(root)], env={**os.environ, "TMPDIR": str(place)}
    )
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"training-{rank}").exists() for rank in range(2)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 5
    process.send_signal(number)
    assert process.wait(timeout=60) == (143 if number == signal.SIGTERM else -number)
    assert still_running(member.pid for member in family) == []
    if number == signal.SIGKILL:
        with scratch(place):
            pass
    assert list(place.iterdir()) == []
