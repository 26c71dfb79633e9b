"""The batch script of the launcher ``slurm``, where Slurm is not; and options that cannot be."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import unipar
from unipar.errors import ConfigError
from unipar.launchers import Task, resolve


def script(tmp_path: Path, *, task: dict[str, Any] | None = None, **options: Any) -> str:
    settings: dict[str, Any] = {
        "devices": 4,
        "num_nodes": 2,
        "device_type": "cuda",
        "timeout": 1800.0,
        "max_restarts": 0,
        "grace_period": 25.0,
        "save_signal": None,
        "directory": tmp_path,
        "name": "night-run",
        **(task or {}),
    }
    return resolve({"name": "slurm", **options}).rendered(Task(lambda placement: None, **settings))


def asked(text: str) -> dict[str, str]:
    """The options that a script asks for."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))


def test_job_is_that_of_the_run(tmp_path: Path):
    options = asked(script(tmp_path, partition="gpu", time="4:00:00"))
    assert options["job-name"] == "night-run"
    assert (options["nodes"], options["ntasks-per-node"]) == ("2", "4")
    assert options["gpus-per-node"] == "4"
    assert (options["partition"], options["time"]) == ("gpu", "4:00:00")
    # It is given notice in time to finish its step, within grace_period, and to leave.
    assert options["signal"] == "TERM@55"
    assert "requeue" in options


def test_what_is_left_out_is_left_to_slurm(tmp_path: Path):
    options = asked(script(tmp_path, task={"device_type": "cpu"}))
    assert set(options) == {
        *("error", "job-name", "nodes", "ntasks-per-node", "open-mode", "output"),
        *("requeue", "signal"),
    }


def test_options_are_those_of_sbatch(tmp_path: Path):
    text = script(
        tmp_path,
        gres="gpu:a100:4",
        cpus_per_task=8,
        mem="0",
        exclusive=True,
        sbatch={"mail-type": "END", "nice": 10, "contiguous": True},
        setup=["module load cuda"],
        srun=["--container-image=image.sqsh"],
        python="apptainer exec image.sif python",
    )
    options = asked(text)
    assert "gpus-per-node" not in options
    assert (options["gres"], options["mem"]) == ("gpu:a100:4", "0")
    assert (options["mail-type"], options["nice"], options["contiguous"]) == ("END", "10", "")
    assert options["exclusive"] == ""
    before, srun = text.split("\nsrun ")
    assert "\nmodule load cuda\n" in before
    assert "--cpus-per-task=8 --container-image=image.sqsh apptainer exec image.sif python" in srun


@pytest.mark.parametrize(
    ("status", "starts", "again"),
    [(0, 0, 0), (143, 0, 1), (143, 7, 0), (1, 0, 2), (137, 0, 2), (2, 0, 0), (130, 0, 0)],
)
def test_what_is_queued_again(tmp_path: Path, status: int, starts: int, again: int):
    """By srun's status: ended by SIGTERM, up to max_requeues; failed, up to max_restarts."""
    text = script(tmp_path, task={"max_restarts": 2}, max_requeues=7)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, line in (("srun", f"exit {status}"), ("scontrol", f"echo $* >> {tmp_path}/said")):
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    environ = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "17"}
    for _ in range(3 if status != 143 else 1):
        ended = subprocess.run(
            ["bash"], input=text, text=True, env={**environ, "SLURM_RESTART_COUNT": str(starts)}
        )
        assert ended.returncode == status
    said = tmp_path / "said"
    assert (said.read_text() if said.exists() else "") == "requeue 17\n" * again


def test_job_that_is_not_to_be_queued_again(tmp_path: Path):
    text = script(tmp_path, requeue=False)
    assert "no-requeue" in asked(text)
    assert "scontrol" not in text
    with pytest.raises(ConfigError, match=r"max_restarts=1, and launcher 'slurm' has requeue=Fal"):
        script(tmp_path, requeue=False, task={"max_restarts": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"partitoin": "gpu"}, "partitoin"),
        ({"time": 14400}, "14400 is no time limit as sbatch takes it: write '30' .minutes."),
        ({"time": "4h"}, "'4h' is no time limit"),
        ({"sbatch": {"array": "0-3"}}, "array cannot be given: one fit is one job"),
        ({"sbatch": {"ntasks": 3}}, "ntasks cannot be given: it is devices times num_nodes"),
        ({"sbatch": {"cpus-per-task": 3}}, "cpus-per-task is an option of the launcher's own"),
        ({"sbatch": {"mail_type": "END"}}, "without dashes: mail-type"),
        ({"sbatch": {"contiguous": False}}, "contiguous: leave it out"),
    ],
)
def test_option_that_cannot_be(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        resolve({"name": "slurm", **options})


def fit(tmp_path: Path, **settings: Any) -> None:
    data = (torch.zeros(8, 2), torch.zeros(8, 1))
    model = torch.nn.Linear(2, 1)

    def loss(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    launcher = {"name": "slurm", "partition": "gpu"}
    settings = {"device": "cpu", "devices": 2, "num_nodes": 2, **settings}
    unipar.fit(
        model,
        data,
        loss=loss,
        strategy="ddp",
        launcher=launcher,
        global_batch_size=4,
        output_dir=tmp_path / "run",
        **settings,
    )


def test_other_machines_are_not_guessed_at(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"give device and devices, such as device='cuda'"):
        fit(tmp_path, device="auto", devices="auto")


def test_no_slurm_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"no command 'sbatch' on PATH. Run this where jobs are"):
        fit(tmp_path)


def test_sbatch_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("sbatch", "srun", "scontrol", "scancel"):
        (tmp_path / name).write_text("#!/bin/sh\necho 'sbatch: error: Invalid account' >&2; exit 1")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigError, match=r"sbatch refuses the job:\nsbatch: error: Invalid acc"):
        fit(tmp_path)


def test_no_submitit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"submitit is not installed. Run: pip install 'unipar"):
        resolve("slurm").resolve_devices("cpu", 1, 1)
