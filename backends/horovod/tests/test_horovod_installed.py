"""What is said where Horovod is missing, of another version, or broken."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from unipar.strategy import registry
from unipar_horovod import installed

FIT = """
import torch, unipar
unipar.fit(torch.nn.Linear(2, 1), (torch.ones(8, 2),), strategy="horovod", devices=2,
           loss=lambda model, batch: model(batch[0]).mean(), global_batch_size=4, progress=False,
           checkpoint=False)
"""


def fake(directory: Path, *, version: str, torch: str, source: str) -> dict[str, str]:
    """The environment of a process that finds this Horovod first."""
    info = directory / f"horovod-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: horovod\nVersion: {version}\n")
    package = directory / "horovod"
    (package / "torch").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "metadata.json").write_text(f'{{"pytorch": "{torch}"}}')
    (package / "torch" / "__init__.py").write_text(source)
    (package / "torch" / "mpi_lib_v2.so").write_text("")
    return {**os.environ, "PYTHONPATH": str(directory), "OMP_NUM_THREADS": "1"}


def fit(tmp_path: Path, environment: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", FIT],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


TORCH = torch.__version__


@pytest.mark.parametrize(
    ("version", "torch", "source", "words"),
    [
        ("0.27.0", TORCH, "", ["0.27.0", "0.28.1", "unipar install horovod"]),
        ("0.28.1", "2.5.0", "", ["torch 2.5.0", f"torch {TORCH}", "unipar install horovod"]),
        (
            "0.28.1",
            TORCH,
            "raise ImportError('undefined symbol: _ZN2at')",
            ["undefined symbol: _ZN2at", "unipar install horovod --force"],
        ),
    ],
    ids=["another version", "built for another torch", "broken"],
)
def test_an_unusable_horovod_is_refused_with_its_remedy(
    tmp_path: Path, version: str, torch: str, source: str, words: list[str]
) -> None:
    said = fit(tmp_path, fake(tmp_path, version=version, torch=torch, source=source))
    assert "ConfigError" in said
    for word in words:
        assert word in said


def test_torch_is_what_it_calls_itself_and_not_what_pip_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package index has the CUDA build of torch as a version without a local part."""
    fake(tmp_path, version="0.28.1", torch="2.13.0+cu130", source="")
    monkeypatch.setattr(installed, "_folder", lambda: tmp_path / "horovod")
    for itself, is_ok in [("2.13.0+cu130", True), ("2.13.0+cpu", False)]:
        monkeypatch.setattr(torch, "__version__", itself)
        assert installed.availability().ok is is_ok


def test_a_missing_horovod_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(installed.metadata, "version", missing)
    found = registry.strategy_class("horovod").availability()
    assert found == (False, "Horovod is not installed.", "unipar install horovod")


def test_the_strategy_is_found_without_importing_horovod() -> None:
    code = (
        "import sys; from unipar.strategy import registry; s = registry.resolve('horovod'); "
        "s.availability(); s.capabilities(); s.recipe(); print('horovod' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
