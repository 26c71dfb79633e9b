"""Checkpoints in S3, over HTTP: moto's server stands in for Amazon's.

s3fs and moto have an environment of their own, which make test-all makes: their pins leave the
frameworks no room.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_run import build

import unipar
from unipar import ConfigError, RunResult, checkpoint
from unipar.checkpoint import RemoteDirectory, remote

Run = Callable[..., RunResult]
s3fs: Any = importlib.import_module("s3fs") if importlib.util.find_spec("s3fs") else None
MISSING = [name for name in ("s3fs", "moto") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(bool(MISSING), reason=f"{' and '.join(MISSING)} not installed"),
]
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
}


class Server:
    """S3 in a process that can be ended and started again."""

    def __init__(self) -> None:
        program = Path(__file__).with_name("s3_server.py")
        self._process = subprocess.Popen(
            [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        host, port = self._process.stdout.readline().split()
        self.url = f"http://{host}:{port}"

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    for name, value in (*ENVIRONMENT.items(), ("AWS_ENDPOINT_URL", server.url)):
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("bucket")
    yield server
    s3fs.S3FileSystem.clear_instance_cache()
    server.close()


def test_a_run_of_two_ranks_goes_on_elsewhere(server: Server, run: Run, tmp_path: Path) -> None:
    url = "s3://bucket/team/run"
    saves = {"directory": url, "every_steps": 2}
    whole = run(steps=8)
    first = run(steps=6, checkpoint=saves, output_dir=tmp_path / "a", strategy="fsdp", devices=2)
    assert RemoteDirectory(url).steps() == [6, 4]
    shutil.rmtree(tmp_path / "a")
    rest = run(steps=8, checkpoint=saves, output_dir=tmp_path / "b", resume="auto")
    assert [record.step for record in rest.history] == [7, 8]
    assert first.losses + rest.losses == pytest.approx(whole.losses, rel=1e-5)
    assert RemoteDirectory(url).steps() == [8, 6]
    last = run(steps=9, resume=f"{url}/step-00000006", output_dir=tmp_path / "c")
    assert [record.step for record in last.history] == [7, 8, 9]
    with checkpoint.fetched(url) as path:
        checkpoint.verify(path)
    unipar.load_model(url, build())


def test_a_large_file_goes_in_parts_and_comes_back(server: Server, tmp_path: Path) -> None:
    """Beyond what S3 takes at once from s3fs."""
    path = tmp_path / "local" / "step-00000001"
    path.mkdir(parents=True)
    (path / "large").write_bytes(os.urandom(1 << 20) * 120)
    there = RemoteDirectory("s3://bucket/large")
    there.put(path, ["large"])
    assert there.steps() == []
    there._fs.get_file("bucket/large/step-00000001/large", str(tmp_path / "back"))
    assert (tmp_path / "back").read_bytes() == (path / "large").read_bytes()
    there.clear()
    assert there._fs.find("bucket/large") == []


def test_no_bucket_and_no_credentials_are_known_before_the_run(
    server: Server, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"s3://none/run cannot be written to: .*bucket does not"):
        run(checkpoint="s3://none/run")
    s3fs.S3FileSystem.clear_instance_cache()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"cannot be written to: .*[Cc]redentials"):
        run(checkpoint="s3://bucket/run")


class Unplugged(unipar.Callback):
    """The server ends in the middle of the run."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def on_step_end(self, run: object, record: unipar.StepRecord) -> None:
        if record.step == 3:
            self.server.close()


def test_a_network_that_is_lost_lets_the_run_go_on(
    server: Server, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PAUSE", 0.01)
    saves = {"directory": "s3://bucket/run", "every_steps": 2}
    began = time.monotonic()
    with pytest.raises(unipar.CheckpointError, match="newest checkpoint is not where it should be"):
        run(steps=6, checkpoint=saves, callbacks=[Unplugged(server)])
    assert time.monotonic() - began < 120
    checkpoint.verify(tmp_path / "run/checkpoints/step-00000006")
