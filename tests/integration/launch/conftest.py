from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from leftovers import processes_of
from outputs import own

PREAMBLE = """
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from unipar.errors import *
from unipar.launch import mark, run
from unipar.world import joined

here = Path(sys.argv[1])
"""


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No process, listening port or temporary file of a run may outlive its test."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = _listening()
    yield
    deadline = time.monotonic() + 30
    while left := _left(str(scratch), before):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
    assert list(scratch.iterdir()) == []


def _listening() -> set[int]:
    connections = psutil.Process().net_connections("inet")
    return {c.laddr.port for c in connections if c.status == "LISTEN"}


def _left(scratch: str, ports: set[int]) -> list[str]:
    """Processes that hold this test's directory in their environment, and new ports of this one."""
    return processes_of(scratch) + [f"port {port}" for port in _listening() - ports]


class Program(subprocess.Popen):
    """A process, whose output is what it says itself."""

    def communicate(self, *given, **options):
        out, err = super().communicate(*given, **options)
        return out and own(out), err


class Script:
    """A script of its own process, as a user would start it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def start(self, body: str, **options) -> subprocess.Popen[str]:
        path = self.directory / "script.py"
        path.write_text(PREAMBLE + textwrap.dedent(body))
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        command = [sys.executable, str(path), str(self.directory)]
        return Program(command, **options)

    def run(self, body: str, *, timeout: float = 60, **options) -> subprocess.CompletedProcess[str]:
        process = self.start(body, **options)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def wait_for(self, *names: str, timeout: float = 90) -> None:
        """Wait until the script has made these files."""
        deadline = time.monotonic() + timeout
        while not all((self.directory / name).exists() for name in names):
            assert time.monotonic() < deadline, f"no {names}"
            time.sleep(0.05)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)
