"""A run's directories, which no second run may have at the same time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_run import build, data, fit_in_world, reference, settings

from unipar import Callback, RunResult, fit
from unipar.errors import ConfigError
from unipar.testing.pool import WorldPools
from unipar.train import lock
from unipar.train.lock import NAME
from unipar.world import Placement

HERE = Path(__file__).parent
Run = Callable[..., RunResult]


class Second(Callback):
    """Starts another run from the first."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.told = ""

    def on_step_end(self, run: Any, record: Any) -> None:
        if record.step == 3:
            with pytest.raises(ConfigError) as caught:
                fit(build(), data(), **self.settings)
            self.told = str(caught.value)


@pytest.mark.parametrize("devices", [1, 2], ids=["in process", "processes"])
@pytest.mark.parametrize("shared", ["output_dir", "checkpoints"])
def test_a_second_run_is_refused_before_it_starts_or_writes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int, shared: str
):
    changes: dict[str, Any] = {"devices": devices, "strategy": "ddp", "seed": 1, "resume": "auto"}
    if shared == "checkpoints":
        changes["output_dir"] = tmp_path / "other"
    second = Second(
        **settings(
            tmp_path / "run",
            checkpoint={"directory": tmp_path / "run" / "checkpoints"},
            **changes,
        )
    )
    monkeypatch.setattr("unipar.launch.run", lambda *_, **__: pytest.fail("processes were started"))
    result = run(checkpoint={"every_steps": 2}, callbacks=[second])
    assert f"process {os.getpid()}, since" in second.told
    assert result.losses == pytest.approx(reference()[0])
    assert "seed: 0" in (tmp_path / "run" / "config.yaml").read_text()
    assert list(tmp_path.rglob(NAME)) == []


class Started(Callback):
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_step_end(self, run: Any, record: Any) -> None:
        if record.step == 3:
            self.mark.touch()
            time.sleep(60)


SLEEPS = """
    import sys
    from pathlib import Path
    from small_run import build, data, settings
    from test_one_run_at_a_time import Started
    from unipar import fit

    run = Path(sys.argv[1])
    changes = {"checkpoint": {"every_steps": 1}, "callbacks": [Started(run / "started")]}
    fit(build(), data(), **settings(run, **changes))
"""


def test_after_kill_9_the_next_run_has_the_directory_at_once(run: Run, tmp_path: Path):
    (tmp_path / "run").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SLEEPS), str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{HERE}"},
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "started").exists() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    try:
        with pytest.raises(ConfigError, match=f"in use by .*process {process.pid}, since"):
            run(checkpoint={}, resume="auto")
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(list(tmp_path.rglob(NAME))) == 2
    result = run(checkpoint={}, resume="auto")
    assert result.losses == pytest.approx(reference()[0][-len(result.losses) :], rel=1e-6)
    assert list(tmp_path.rglob(NAME)) == []


def refusal(placement: Placement, directory: Path, *arguments: Any, **changes: Any) -> str:
    try:
        fit_in_world(placement, directory, None, *arguments, strategy="ddp", **changes)
    except ConfigError as error:
        return str(error)
    return "trained"


def test_every_rank_is_told(world_pool: WorldPools, tmp_path: Path):
    """Not only rank 0, while the others wait for it."""
    holder = {"machine": "another", "host": "node7", "user": "ada", "pid": 5, "since": "noon"}
    (tmp_path / NAME).write_text(json.dumps(holder))
    told = world_pool(2).run(refusal, tmp_path)
    assert told[0] == told[1]
    assert "in use by a run of ada on node7, process 5, since noon" in told[0]
    (tmp_path / NAME).unlink()
    assert world_pool(2).run(refusal, tmp_path) == ["trained"] * 2


def test_a_directory_that_rank_0_cannot_write_is_told_to_every_rank(
    world_pool: WorldPools, tmp_path: Path
):
    (tmp_path / "file").touch()
    told = world_pool(2).run(refusal, tmp_path / "file" / "run")
    assert told[0] == told[1]
    assert "the run's directory cannot be written" in told[0]


def test_the_next_start_takes_over_what_one_has_left_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("UNIPAR_RUN", "/shared/run/launch/000")
    monkeypatch.setenv("UNIPAR_RESTART", "0")
    with lock.held(tmp_path):
        left = json.loads((tmp_path / NAME).read_text())
    (tmp_path / NAME).write_text(json.dumps({**left, "machine": "another"}))
    with pytest.raises(ConfigError, match="is in use by"), lock.held(tmp_path):
        pass
    monkeypatch.setenv("UNIPAR_RESTART", "1")
    with lock.held(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["machine"] != "another"
