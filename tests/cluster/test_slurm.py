"""``fit(launcher="slurm")`` on two nodes of a real Slurm."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from slurm_cluster import SlurmCluster

pytestmark = pytest.mark.timeout(180)

PROGRAM = Path(__file__).with_name("slurm_program.py")


class Run:
    """A process that submits a job and follows it."""

    def __init__(self, slurm: SlurmCluster, output_dir: Path, arguments: list[str]) -> None:
        self.slurm, self.output_dir = slurm, output_dir
        self.said = output_dir.with_suffix(".txt")
        with self.said.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=slurm.environ,
                cwd=output_dir.parent,
            )

    def text(self) -> str:
        return self.said.read_text()

    def says(self, pattern: str) -> re.Match[str]:
        """Wait until it says something."""

        def found() -> re.Match[str] | None:
            ended = self.process.poll() is not None
            match = re.search(pattern, self.text())
            if match is None and ended:
                pytest.fail(self.text())
            return match

        return self.slurm.wait(found)

    def job(self) -> str:
        return self.says(r"Slurm job (\d+)")[1]

    def end(self, seconds: float = 120) -> tuple[int, str]:
        """Its exit code and all that it has said, once it has ended."""
        return self.process.wait(timeout=seconds), self.text()


@pytest.fixture
def submit(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(
        what: str = "nothing", *, output_dir: Path | None = None, fit: Any = None, **launcher: Any
    ) -> Run:
        output_dir = output_dir or tmp_path / f"run-{len(runs)}"
        output_dir.parent.mkdir(exist_ok=True)
        options = [json.dumps(launcher), json.dumps(fit or {})]
        runs.append(Run(slurm, output_dir, ["slurm", str(output_dir), what, *options]))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.wait()
    slurm.clear()


@pytest.fixture(scope="module")
def losses(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Those of the same run by the local launcher."""
    output_dir = tmp_path_factory.mktemp("local") / "run"
    run = Run(slurm, output_dir, ["local", str(output_dir), "nothing"])
    code, text = run.end()
    assert code == 0, text
    return losses_in(text)


def losses_in(text: str) -> list[float]:
    return json.loads(re.search(r"^LOSSES (.*)$", text, re.MULTILINE)[1])  # pyright: ignore[reportOptionalSubscript]


def goes_on(found: list[float], losses: list[float]) -> bool:
    """Whether these are the losses from a checkpoint on."""
    return len(found) < len(losses) and found == losses[-len(found) :]


def test_two_nodes_train_as_one(submit: Callable[..., Run], losses: list[float]):
    run = submit(partition="main", time="10", cpus_per_task=1, sbatch={"comment": "a word"})
    code, text = run.end()
    assert code == 0, text
    assert losses_in(text) == losses
    assert "runs on n[1-2]" in text
    assert "batch 12\n" in text
    logs = run.output_dir / "launch" / "000" / "attempt-0"
    assert "batch 12\n" in (logs / "rank-1.log").read_text()


def test_error_of_a_rank_is_raised_here(submit: Callable[..., Run]):
    code, text = submit("error").end()
    assert code == 1
    assert "WorkerError: Rank 1 of 2 failed in step 4 (forward): ValueError: of rank 1" in text
    assert "slurm_program.py" in text.split("Traceback of rank 1")[1]


def test_failed_job_starts_again(
    slurm: SlurmCluster, submit: Callable[..., Run], losses: list[float]
):
    run = submit("first-error", fit={"max_restarts": 1})
    slurm.hurry(run.job())
    code, text = run.end()
    assert code == 0, text
    assert "queued again (start 2): Rank 1 of 2 failed in step 4" in text
    assert goes_on(losses_in(text), losses)


def test_preempted_job_goes_on_where_it_was(
    slurm: SlurmCluster, submit: Callable[..., Run], losses: list[float]
):
    run = submit("slow", exclusive=True)
    run.says("batch 5")
    slurm("sbatch", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "true")
    slurm.hurry(run.job())
    code, text = run.end()
    assert code == 0, text
    assert "queued again (start 2): it was asked to end (SIGTERM)" in text
    assert goes_on(losses_in(text), losses)
    # It has saved at the step it was in.
    assert text.count("batch ") == 12


def test_one_process_knows_that_it_was_queued_again(
    slurm: SlurmCluster, submit: Callable[..., Run], losses: list[float]
):
    # To Slurm's variables, one process alone is not found to be one of a run.
    run = submit("slow", fit={"num_nodes": 1})
    run.says("batch 5")
    slurm("scancel", "--signal=TERM", run.job())
    slurm.hurry(run.job())
    code, text = run.end()
    assert code == 0, text
    assert losses_in(text) == pytest.approx(losses[-len(losses_in(text)) :], rel=1e-4)
    assert text.count("batch ") == 12


@pytest.mark.thorough
def test_time_limit(slurm: SlurmCluster, submit: Callable[..., Run]):
    # Slurm looks every half minute, and sends the signal that much too early.
    run = submit("slow", time="2", fit={"steps": 300, "grace_period": 5.0})
    slurm.wait(lambda: slurm.job(run.job()).get("Restarts") == "1", 120)
    assert "it was asked to end (SIGTERM)" in run.says("queued again.*")[0]


@pytest.mark.thorough
@pytest.mark.timeout(420)
def test_killed_node(slurm: SlurmCluster, submit: Callable[..., Run], losses: list[float]):
    run = submit("slow")
    run.says("batch 5")
    slurm.kill_node("n2")
    try:
        slurm.wait(lambda: slurm.job(run.job()).get("Restarts") == "1")
    finally:
        slurm.start_node("n2")
    # Not hurried: Slurm may yet tell the node to end the job of before, which has the same number.
    code, text = run.end(300)
    assert code == 0, text
    assert "queued again (start 2): " in text
    assert goes_on(losses_in(text), losses)


def test_canceled(slurm: SlurmCluster, submit: Callable[..., Run]):
    run = submit("slow")
    run.says("batch 3")
    slurm("scancel", run.job())
    code, text = run.end()
    assert code == 143, text
    assert f"Slurm job {run.job()} is CANCELLED" in text
    assert list((run.output_dir / "checkpoints").iterdir())


def test_interrupted_process_leaves_the_job(slurm: SlurmCluster, submit: Callable[..., Run]):
    run = submit("slow")
    run.says("batch 3")
    run.process.send_signal(signal.SIGINT)
    code, text = run.end()
    assert code in (130, -signal.SIGINT), text
    assert f"Slurm job {run.job()} goes on without this process" in text
    slurm.wait(lambda: slurm.job(run.job())["JobState"] == "COMPLETED")


def test_waiting_job_says_why(slurm: SlurmCluster, submit: Callable[..., Run]):
    slurm("sbatch", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 60")
    run = submit()
    run.says("waits: (Resources|Priority)")
    slurm("scancel", run.job())
    code, text = run.end()
    assert code == 1
    assert f"ended without a word: Slurm job {run.job()} is CANCELLED" in text


def test_partition_that_does_not_exist(submit: Callable[..., Run]):
    code, text = submit(partition="nope").end()
    assert code == 1
    assert "ConfigError: sbatch refuses the job:\nsbatch: error: invalid partition" in text


def test_interpreter_without_what_is_needed(submit: Callable[..., Run]):
    code, text = submit(python="/usr/bin/python3").end()
    assert code == 1
    assert "No module named" in text


def test_directory_that_is_not_shared(slurm: SlurmCluster, submit: Callable[..., Run]):
    code, text = submit(output_dir=slurm.unshared / "run").end()
    assert code == 1
    assert "has to be on a file system that all its machines share: set output_dir" in text
