"""What ``make dist`` builds, installed where nothing of the checkout is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[3]
# Each distribution, and the packages in it.
PACKAGES = {
    "unipar": ["unipar", "backends/torch/unipar_torch"],
    **{
        f"unipar_{name}": [f"backends/{name}/unipar_{name}"]
        for name in ("accelerate", "colossalai", "deepspeed", "horovod")
    },
}
TRAIN = """
import json, sys
import torch
import unipar, unipar_deepspeed, unipar_torch

inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
losses = {}
for strategy in ("ddp", "zero2"):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    result = unipar.fit(
        model, inputs, strategy=strategy, devices=2, device="cpu", global_batch_size=16, epochs=2,
        loss=lambda model, batch: (model(batch).squeeze(1) - batch.sum(1)).square().mean(),
        optimizer={"name": "adamw", "lr": 0.01}, output_dir=strategy,
    )
    losses[strategy] = result.metrics["train_loss"]
files = [module.__file__ for module in (unipar, unipar_torch, unipar_deepspeed)]
print("FOUND", json.dumps({"losses": losses, "files": files}))
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``make dist`` has built, with the tools of this environment."""
    directory = tmp_path_factory.mktemp("built") / "dist"
    # The environment is as it is.
    here = [f"VENV={sys.prefix}", "-o", f"{sys.prefix}/.dev", f"DIST={directory}"]
    done = subprocess.run(["make", "dist", *here], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


@dataclass(frozen=True)
class Elsewhere:
    """An environment without the checkout, and an empty folder to start programs in."""

    root: Path

    @property
    def python(self) -> Path:
        return self.root / "venv" / "bin" / "python"

    def run(self, *command: str, check: bool = True) -> str:
        folder = self.root / "work"
        folder.mkdir(exist_ok=True)
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [str(self.python.parent / command[0]), *command[1:]],
            cwd=folder,
            env={**environ, "CI": ""},
            capture_output=True,
            text=True,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout


def wheels(built: Path, names: Sequence[str] = tuple(PACKAGES)) -> list[Path]:
    return [next(built.glob(f"{name}-*.whl")) for name in names]


@pytest.fixture(scope="module")
def elsewhere(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Elsewhere:
    """The wheels beside what other distributions this environment has."""
    home = Elsewhere(tmp_path_factory.mktemp("elsewhere"))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home.root / "venv"], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(home.python)]
    subprocess.run(
        [*pip, "install", "--quiet", "--no-index", "--no-deps", *wheels(built)], check=True
    )
    site = next(home.root.glob("venv/lib/python3*/site-packages"))
    # The .pth files in there, and with them the checkout, are not followed.
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    return home


@pytest.mark.parametrize("name", PACKAGES)
def test_an_archive_holds_its_packages_whole(built: Path, name: str) -> None:
    expected = set()
    for package in (ROOT / path for path in PACKAGES[name]):
        files = (path for path in package.rglob("*") if path.is_file())
        kept = {str(path.relative_to(package.parent)) for path in files if path.suffix != ".pyc"}
        assert f"{package.name}/py.typed" in kept
        expected |= kept
    (wheel,) = wheels(built, [name])
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
        info = next(path.split("/")[0] for path in inside if ".dist-info/" in path)
        assert {path for path in inside if not path.startswith(info)} == expected
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        assert b"[unipar.strategies]" in archive.read(f"{info}/entry_points.txt")
    with tarfile.open(next(built.glob(f"{name}-*.tar.gz"))) as sources:
        top = {path.partition("/")[2] for path in sources.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= top


def check_it_trains(home: Elsewhere) -> None:
    """Train by ``ddp`` and ``zero2``, and run two cases of the kit, with what is there."""
    (home.root / "train.py").write_text(TRAIN)
    said = home.run("python", str(home.root / "train.py"))
    found = json.loads(said.rpartition("FOUND ")[2])
    assert found["losses"]["zero2"] == pytest.approx(found["losses"]["ddp"], abs=1e-5)
    for path in map(Path, found["files"]):
        assert path.is_relative_to(home.root / "venv")
    kit = "-m pytest -p no:cacheprovider --pyargs unipar.testing --strategy ddp --world-sizes 2"
    cases = "equals_the_reference or accumulates"
    said = home.run("python", *kit.split(), "-k", cases)
    assert "2 passed" in said
    assert "rootdir: " + str(home.root / "work") in said


@pytest.mark.thorough
def test_the_wheels_train_and_prove_it_away_from_the_checkout(elsewhere: Elsewhere) -> None:
    check_it_trains(elsewhere)
    said = elsewhere.run("unipar", "doctor", check=False)
    for name in ("accelerate", "colossalai", "deepspeed", "horovod"):
        assert f"unipar-{name}" in said


@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_an_empty_environment_needs_nothing_but_the_wheels_and_the_pins(
    built: Path, tmp_path: Path
) -> None:
    home = Elsewhere(tmp_path)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    unipar, deepspeed = wheels(built, ["unipar", "unipar_deepspeed"])
    home.run(
        *("python", "-m", "pip", "--disable-pip-version-check", "install", "--no-cache-dir"),
        *("-c", str(ROOT / "constraints.txt"), f"{unipar}[test]", str(deepspeed)),
    )
    check_it_trains(home)
    shutil.rmtree(tmp_path / "venv")
