"""Runs as TrainJobs: by the SDK's local processes, and by what stands for a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unipar
from unipar import ConfigError, WorkerError
from unipar.config.settings import load_settings
from unipar.launchers import resolve
from unipar.train.dry_run import resolve_run

pytest.importorskip("kubeflow")

from fake_cluster import FakeCluster


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    found = FakeCluster(tmp_path)
    # kubernetes 35, config/kube_config.py: read when it is imported.
    monkeypatch.setattr(
        "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(found.config)
    )
    yield found
    found.close()


def on_cluster(mount: Path, **options: Any) -> dict[str, Any]:
    return {"name": "kubernetes", "claim": "shared", "mount": str(mount), **options}


def train(launcher: Any, output_dir: Path, loss: Any = None, **more: Any) -> unipar.RunResult:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(32, 4, generator=generator)
    torch.manual_seed(0)
    return unipar.fit(
        nn.Linear(4, 1),
        (x, x.sum(1, keepdim=True)),
        loss=loss or (lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1])),
        strategy="ddp",
        launcher=launcher,
        device="cpu",
        devices=2,
        global_batch_size=8,
        steps=4,
        optimizer={"name": "sgd", "lr": 0.1},
        output_dir=output_dir,
        progress=False,
        **more,
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return list(train("local", tmp_path_factory.mktemp("local")).losses)


def test_processes_of_the_sdk_train_as_ours_do(tmp_path: Path, undisturbed: list[float]) -> None:
    before = os.getcwd()
    result = train("kubernetes:backend=local", tmp_path / "run")
    assert result.losses == undisturbed
    assert result.checkpoint is not None
    assert os.getcwd() == before


def test_a_trainjob_trains_as_processes_here_do(
    cluster: FakeCluster, tmp_path: Path, undisturbed: list[float], capsys: Any
) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        print("seen", flush=True)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    options = on_cluster(tmp_path, image="me/x:1", env={"SAID": "yes"}, resources={"cpu": 2})
    result = train(options, tmp_path / "My run", loss)
    assert result.losses == undisturbed
    # Rank 0's output, as it came.
    assert capsys.readouterr().out.count("seen") == 4
    (job,) = cluster.jobs.values()
    assert job["metadata"]["name"].startswith("my-run-")
    assert job["spec"]["trainer"]["numProcPerNode"] == 2
    assert job["spec"]["trainer"]["resourcesPerNode"]["limits"] == {"cpu": "2"}


def test_the_error_of_a_rank_comes_to_the_caller(cluster: FakeCluster, tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if torch.distributed.get_rank() == 1:
            raise ValueError("of rank 1")
        return model(batch[0]).sum()

    with pytest.raises(WorkerError, match=r"(?s)Rank 1 of 2 failed in step 1 .*of rank 1.*raise V"):
        train(on_cluster(tmp_path), tmp_path / "run", loss)


def test_a_job_that_is_deleted_is_no_run_that_ended_well(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        (tmp_path / "began").touch()
        time.sleep(60)
        return model(batch[0]).sum()

    def delete() -> None:
        while not (tmp_path / "began").exists():
            time.sleep(0.05)
        cluster.delete(next(iter(cluster.jobs)))

    threading.Thread(target=delete).start()
    with pytest.raises((WorkerError, unipar.errors.Terminated)):
        train(on_cluster(tmp_path), tmp_path / "run", loss, grace_period=1.0)


def test_left_alone_a_job_goes_on(
    cluster: FakeCluster, tmp_path: Path, capsys: Any, caplog: Any
) -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        (tmp_path / "began").touch()
        time.sleep(1)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def interrupt() -> None:
        while not (tmp_path / "began").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        train(on_cluster(tmp_path), tmp_path / "run", loss)
    assert "goes on without this process" in caplog.text
    (process,) = cluster.processes.values()
    assert process.wait(60) == 0
    assert (tmp_path / "run" / "checkpoints" / "step-00000004").exists()


def test_a_cluster_that_refuses_says_why(cluster: FakeCluster, tmp_path: Path) -> None:
    cluster.refuses = 'trainjobs is forbidden: User "me" cannot create resource'
    with pytest.raises(ConfigError, match=r"refuses the TrainJob: trainjobs is forbidden"):
        train(on_cluster(tmp_path), tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"runtime": "missing"}, r"(?s)runtime 'missing' cannot be had.*kubectl get"),
        ({"context": "nowhere"}, r"(?s)no cluster is configured here: .*nowhere"),
        ({"mount": "/elsewhere"}, r"output_dir is not below mount='/elsewhere'"),
        ({"mount": None}, r"needs a volume .*set mount,"),
        ({"pods": {"volumes": []}}, r"pods\.volumes is set by unipar"),
        ({"pods": {"nodeSelector": 3}}, r"is not one that Kubeflow Trainer takes"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(
    cluster: FakeCluster, tmp_path: Path, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        train({**on_cluster(tmp_path), **options}, tmp_path / "run")
    assert not cluster.jobs


def test_a_dry_run_refuses_what_pods_could_not_reach(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        textwrap.dedent(
            """
            model: {target: torch.nn:Linear, in_features: 2, out_features: 1}
            data: {target: torch:zeros, size: [4, 2]}
            strategy: ddp
            device: cpu
            devices: 2
            global_batch_size: 2
            """
        )
    )
    launcher = f"kubernetes:claim=c,mount={tmp_path}/shared"
    flags = {"launcher": launcher}
    settings = load_settings(file, environ={}, flags=flags, sets=())
    with pytest.raises(ConfigError, match=r"output_dir is not below mount=.*Set output_dir="):
        resolve_run(settings)
    below = (f"output_dir={tmp_path}/shared/run",)
    settings = load_settings(file, environ={}, flags=flags, sets=below)
    assert f"{tmp_path}/shared/run/launch/000" in resolve_run(settings).rendered


def test_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = str(tmp_path / "missing")
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", missing)
    with pytest.raises(ConfigError, match=r"no cluster is configured here"):
        train(on_cluster(tmp_path), tmp_path / "run")


def test_a_machine_elsewhere_is_not_told_by_this_one(tmp_path: Path) -> None:
    launcher = resolve(on_cluster(tmp_path))
    assert launcher.elsewhere
    with pytest.raises(ConfigError, match=r"'auto' is there: give device and devices"):
        unipar.fit(nn.Linear(1, 1), torch.zeros(4, 1), strategy="ddp", launcher=launcher.options)


@pytest.mark.thorough
def test_nothing_goes_on_when_the_process_that_called_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import pathlib, time, unipar

            def work(placement):
                pathlib.Path({str(tmp_path)!r}, "began").touch()
                time.sleep(100)

            unipar.spawn(work, launcher="kubernetes:backend=local", devices=1, device="cpu",
                         output_dir={str(tmp_path / "out")!r})
            """
        )
    )
    caller = subprocess.Popen([sys.executable, str(script)], cwd=tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "began").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    caller.kill()
    caller.wait()
    # That no process is left is looked at after each test.
