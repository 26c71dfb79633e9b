"""SIGTERM, SIGHUP and SIGUSR1, as schedulers send them: to a launcher, to one rank, to all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from leftovers import processes_of
from outputs import own
from small_run import build, data, reference, settings

from unipar import fit

pytestmark = pytest.mark.timeout(300)

HERE = Path(__file__).parent
STEPS = 60
RUN = """
    import os, sys, time
    from pathlib import Path
    from small_run import Watched, build, data, settings
    from unipar import Callback, fit

    here, changes = Path(sys.argv[1]), eval(sys.argv[2])

    class Slow(Callback):
        every_rank = True

        def on_step_end(self, run, record):
            (here / f"pid-{run.rank}").write_text(str(os.getpid()))
            if run.rank == 0:
                (here / "step.partial").write_text(str(record.step))
                (here / "step.partial").rename(here / "step")
            time.sleep(changes.get("pause", 0.2))

    def wait():
        (here / "loading").touch()
        time.sleep(600)

    samples = Watched(0, wait) if changes.get("stuck") else data()
    known = {name: value for name, value in changes.items() if name not in ("pause", "stuck")}
    values = {"checkpoint": {}, "resume": "auto", "shuffle": True, "log_level": "info", **known}
    try:
        fit(build(), samples, callbacks=[Slow()], **settings(here / "run", steps=60, **values))
        print("done")
    finally:
        # What the script itself would clean up.
        print("left")
"""


class Run:
    """A script that trains, step by step slowly."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.script = directory / "run.py"
        self.script.write_text(textwrap.dedent(RUN))
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self,
        *launcher: str,
        environ: dict[str, str] | None = None,
        before: Callable[[], Any] | None = None,
        **changes: Any,
    ) -> subprocess.Popen[str]:
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [*(launcher or (sys.executable, "-W", "ignore")), str(self.script),
             str(self.directory), repr(changes)],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **(environ or {})},
            preexec_fn=before,
        )  # fmt: skip
        self.started.append(process)
        return process

    def wait_for(self, condition: Callable[[], Any], *processes: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 150
        while not condition():
            assert all(process.poll() is None for process in processes), processes[0].communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def step(self) -> int:
        path = self.directory / "step"
        return int(path.read_text()) if path.exists() else 0

    def rank(self, rank: int) -> int:
        return int((self.directory / f"pid-{rank}").read_text())

    def checkpoints(self) -> list[str]:
        found = (self.directory / "run" / "checkpoints").glob("step-*")
        return sorted(path.name for path in found)

    def goes_on(self) -> None:
        """Resume in this process; the losses are those of a run that was never stopped."""
        changes = {"checkpoint": {}, "resume": "auto", "steps": STEPS}
        result = fit(build(), data(), **settings(self.directory / "run", **changes))
        whole = reference(STEPS)[0]
        assert 0 < len(result.losses) < STEPS
        assert result.losses == pytest.approx(whole[-len(result.losses) :], rel=1e-4)


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run whose processes and temporary files have all gone when the test ends."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    run = Run(tmp_path)
    yield run
    for process in run.started:
        process.kill()
    deadline = time.monotonic() + 30
    while left := processes_of(str(scratch)):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
    assert [path.name for path in scratch.glob("unipar*")] == []


def stopped(process: subprocess.Popen[str], number: signal.Signals) -> str:
    """What a stopped run has said, once; it has ended with the signal's exit code."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert own(out) == "left\n"
    assert "Traceback" not in err
    return err


def test_a_run_saves_when_asked_goes_on_and_stops_with_the_code_of_the_signal(slow: Run):
    process = slow.start(strategy="ddp", devices=2)
    slow.wait_for(lambda: slow.step() > 1, process)
    process.send_signal(signal.SIGUSR1)
    slow.wait_for(slow.checkpoints, process)
    saved = slow.step()
    slow.wait_for(lambda: slow.step() > saved, process)
    process.send_signal(signal.SIGTERM)
    err = stopped(process, signal.SIGTERM)
    first, last = slow.checkpoints()
    assert f"to {slow.directory}/run/checkpoints/{first}, as a signal asks" in err
    said = f"unipar: SIGTERM: stopped after step {int(last[5:])}; saved to {slow.directory}"
    assert err.count(said) == 1
    assert "continue with resume='auto'" in err
    slow.goes_on()


@pytest.mark.parametrize(
    ("number", "changes"),
    [
        pytest.param(signal.SIGHUP, {}, marks=pytest.mark.thorough),
        pytest.param(
            signal.SIGTERM, {"strategy": "fsdp", "devices": 2}, marks=pytest.mark.thorough
        ),
    ],
    ids=["single", "a-rank-of-fsdp"],
)
def test_a_signal_to_a_rank_stops_all_at_the_same_step(
    slow: Run, number: signal.Signals, changes: dict[str, Any]
):
    process = slow.start(**changes)
    slow.wait_for(lambda: slow.step() > 1, process)
    os.kill(slow.rank(changes.get("devices", 1) - 1), number)
    whose = " by a signal to rank 1 alone," if changes else ""
    assert f"{number.name}: stopped{whose} after step" in stopped(process, number)
    slow.goes_on()


@pytest.mark.thorough
def test_an_interrupt_of_one_rank_blames_no_other(slow: Run):
    process = slow.start(strategy="ddp", devices=2)
    slow.wait_for(lambda: slow.step() > 1, process)
    os.kill(slow.rank(1), signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    assert "unipar: interrupted by a signal to rank 1 alone, after step" in err
    assert "WorkerError" not in err
    assert process.returncode == -signal.SIGINT
    slow.goes_on()


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_step_that_outlasts_the_grace_period_is_given_up(slow: Run, devices: int):
    strategy = "single" if devices == 1 else "ddp"
    process = slow.start(
        strategy=strategy, devices=devices, pause=600, grace_period=1.0,
        checkpoint={"every_steps": 1},
    )  # fmt: skip
    slow.wait_for(slow.step, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "did not come to the end of its step and save within grace_period=1 s. Nothing" in err


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, 2])
def test_before_the_first_step_it_ends_at_once(slow: Run, devices: int):
    process = slow.start(
        strategy="single" if devices == 1 else "ddp", devices=devices, stuck=True, shuffle=False
    )
    slow.wait_for((slow.directory / "loading").exists, process)
    process.send_signal(signal.SIGTERM)
    stopped(process, signal.SIGTERM)
    assert slow.checkpoints() == []


@pytest.mark.thorough
def test_the_second_ends_at_once(slow: Run):
    process = slow.start(strategy="ddp", devices=2, pause=600, grace_period=600.0)
    slow.wait_for(slow.step, process)
    process.send_signal(signal.SIGTERM)
    time.sleep(3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    stopped(process, signal.SIGTERM)


@pytest.mark.thorough
def test_what_nohup_has_made_ignored_stays_ignored_in_all_processes(slow: Run):
    def nohup() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process = slow.start(strategy="ddp", devices=2, before=nohup)
    slow.wait_for(lambda: slow.step() > 1, process)
    for pid in (process.pid, slow.rank(0), slow.rank(1)):
        os.kill(pid, signal.SIGHUP)
    seen = slow.step()
    slow.wait_for(lambda: slow.step() > seen + 2, process)
    process.send_signal(signal.SIGTERM)
    stopped(process, signal.SIGTERM)


@pytest.mark.thorough
def test_torchrun_leaves_its_workers_the_time_to_save(slow: Run):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--log-dir", str(slow.directory / "logs"), "--nproc-per-node=2"]
    process = slow.start(*launcher, strategy="ddp")
    slow.wait_for(lambda: slow.step() > 1, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert err.count("unipar: SIGTERM: stopped after step") == 1
    assert process.returncode
    slow.goes_on()


@pytest.mark.thorough
def test_srun_signals_every_process_and_each_ends_with_the_code(slow: Run):
    def variables(rank: int) -> dict[str, str]:
        return {
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank),
            "SLURM_NTASKS": "2",
            "SLURM_NNODES": "1",
            "SLURM_NODEID": "0",
            "SLURM_NODELIST": "localhost",
        }

    ranks = [slow.start(strategy="ddp", environ=variables(rank)) for rank in range(2)]
    slow.wait_for(lambda: slow.step() > 1, *ranks)
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    said = [stopped(rank, signal.SIGTERM) for rank in ranks]
    assert "unipar: SIGTERM: stopped after step" in said[0]
    assert "stopped" not in said[1]
    slow.goes_on()


@pytest.mark.thorough
def test_the_next_run_removes_what_a_killed_launcher_has_left(slow: Run, tmp_path: Path):
    process = slow.start(strategy="ddp", devices=2)
    slow.wait_for(lambda: slow.step() > 1, process)
    family = [process.pid, slow.rank(0), slow.rank(1)]
    # All in one moment, so that no worker is there to see that the launcher is gone.
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in family:
            os.kill(pid, number)
    process.communicate(timeout=60)
    scratch = Path(tempfile.gettempdir())
    assert len([*scratch.glob("unipar.*")]) == 1
    fit(build(), data(), **settings(tmp_path / "next", strategy="ddp", devices=2, steps=1))
    assert [*scratch.glob("unipar.*")] == []
