"""The field ``launcher``: how it may be written, and what is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unipar
from unipar import ConfigError, RunConfig
from unipar.config.settings import load_settings
from unipar.launchers import resolve
from unipar.launchers.mpi import MpiOptions


@pytest.mark.parametrize(
    "written",
    ["mpi:hosts=[a,b],port=7", {"name": "mpi", "hosts": ["a", "b"], "port": 7},
     MpiOptions(hosts=("a", "b"), port=7)],
)  # fmt: skip
def test_three_ways_to_write_it(written: Any) -> None:
    assert resolve(written).options == MpiOptions(hosts=("a", "b"), port=7)
    config = RunConfig.build({"launcher": written})
    assert resolve(config.launcher).options == MpiOptions(hosts=("a", "b"), port=7)
    dumped = config.model_dump(mode="json")["launcher"]
    assert dumped == {"name": "mpi", "hosts": ["a", "b"], "port": 7}


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("mpo", r"no launcher 'mpo'. Did you mean 'mpi'\? Installed: .*local, mpi"),
        ("mpi:host=[a]", r"launcher 'mpi': .*host.*Did you mean 'hosts'"),
        ("mpi:port=high", r"launcher 'mpi': .*port"),
        ("mpi:port=99999999", r"launcher 'mpi': .*port.*99999999"),
        ("mpi:port=0", r"launcher 'mpi': .*port"),
        ("torchrun:port=65536", r"launcher 'torchrun': .*port"),
        ("slurm:mem=-1", r"launcher 'slurm': .*mem"),
        ("slurm:mem=true", r"launcher 'slurm': .*mem"),
        ({"hosts": ["a"]}, r"launcher .* has no name"),
        (3, r"launcher 3 \(int\) was given"),
    ],
)
def test_what_is_wrong_with_it_is_said(written: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s){said}"):
        resolve(written)


@pytest.mark.parametrize(("written", "mem"), [("0", "0"), ("4096", "4096"), ("64G", "64G")])
def test_memory_may_be_a_number(written: str, mem: str) -> None:
    assert resolve(f"slurm:mem={written}").options.mem == mem


def test_a_run_file_the_environment_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        textwrap.dedent(
            """
            model: {target: torch.nn:Linear, args: {in_features: 2, out_features: 1}}
            data: {target: torch:zeros, args: [[4, 2]]}
            launcher: mpi
            """
        )
    )
    run = load_settings(file, environ={"UNIPAR_LAUNCHER__PORT": "7"}, flags={}, sets=()).run
    assert resolve(run.launcher).options == MpiOptions(port=7)
    sets = ("launcher.hosts=[a]",)
    run = load_settings(file, environ={}, flags={"launcher": "mpi:port=9"}, sets=sets).run
    assert resolve(run.launcher).options == MpiOptions(hosts=("a",), port=9)
    with pytest.raises(ConfigError, match=r"run\.yaml:4|launcher"):
        load_settings(file, environ={}, flags={}, sets=("launcher.hostz=[a]",))


def fit(**more: Any) -> unipar.RunResult:
    data = torch.zeros(4, 2)
    return unipar.fit(
        nn.Linear(2, 1),
        data,
        loss=lambda model, batch: model(batch).sum(),
        strategy="ddp",
        global_batch_size=2,
        **more,
    )


def test_other_machines_are_not_told_by_this_one() -> None:
    with pytest.raises(ConfigError, match=r"'auto' is there: give devices, such as device='cuda'"):
        fit(launcher="mpi:hosts=[a,b]", num_nodes=2, device="cpu")


def test_as_many_hosts_as_nodes() -> None:
    with pytest.raises(ConfigError, match=r"num_nodes=3, and launcher 'mpi' has 2 hosts \(a, b\)"):
        fit(launcher="mpi:hosts=[a,b],mpirun=env", num_nodes=3, device="cpu", devices=1)


def test_a_command_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"no command 'mpirum' on PATH. Install Open MPI"):
        fit(launcher="mpi:mpirun=mpirum")


def test_several_machines_take_a_launcher() -> None:
    with pytest.raises(ConfigError, match=r"num_nodes=2, and launcher='local' starts processes on"):
        fit(num_nodes=2, devices=1, device="cpu")


def test_a_process_of_another_launcher_joins_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    fit(launcher="mpi", output_dir=tmp_path / "run", progress=False)
    assert "launcher 'mpi' starts nothing: another launcher has started this process" in caplog.text


def test_launchers_are_imported_when_they_are_asked_for() -> None:
    code = (
        "import sys, unipar.launchers as l; l.resolve('local'); "
        "print([m for m in sys.modules if m.startswith(('unipar.launchers.', 'kubeflow', "
        "'submitit', 'ray'))])"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "unipar.launchers.local" in said.stdout
    assert not [name for name in ("mpi", "kube", "slurm", "submitit", "ray") if name in said.stdout]


def test_ranks_need_no_library_of_what_started_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    launcher = resolve({"name": "kubernetes", "claim": "a", "mount": "/b"})
    assert not launcher.starts_here
    with pytest.raises(ConfigError, match=r"SDK is not installed. .*pip install \"unipar\[kube"):
        launcher.resolve_devices("cpu", 1, 1)


def test_a_strategy_is_not_chosen_by_this_machine_for_others() -> None:
    data = torch.zeros(4, 2)
    with pytest.raises(ConfigError, match=r"strategy='auto' goes by the devices of this machine"):
        unipar.fit(
            nn.Linear(2, 1),
            data,
            loss=lambda model, batch: model(batch).sum(),
            launcher="mpi:hosts=[a,b],mpirun=env",
            num_nodes=2,
            devices=1,
            device="cuda",
            global_batch_size=2,
        )
