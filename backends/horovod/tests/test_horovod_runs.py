"""Runs as a user starts them: by every launcher, quietly, and with ranks that are lost."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent

SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
import unipar

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(32, 8, generator=generator)
targets = inputs.sum(1, keepdim=True)
what, output, marker = sys.argv[1], sys.argv[2], sys.argv[2] + "/was-here"


def trip(gradient):
    # Within the backward pass: the other rank waits for this one's gradients.
    if what == "killed" or (what == "restarted" and not os.path.exists(marker)):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stuck":
        time.sleep(600)


steps = 0


def loss(model, batch):
    global steps
    steps += 1
    value = nn.functional.mse_loss(model(batch[0]), batch[1])
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if what != "train" and rank == 1 and steps == 4:
        value.register_hook(trip)
    return value


result = unipar.fit(
    lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)),
    (inputs, targets),
    strategy=os.environ.get("STRATEGY", "horovod"),
    loss=loss,
    global_batch_size=8,
    steps=8,
    progress=False,
    output_dir=output,
    checkpoint={"every_steps": 2, "async": False} if what == "restarted" else False,
    max_restarts=1 if what == "restarted" else 0,
    timeout=10 if what == "stuck" else 60,
    **({"devices": int(os.environ["DEVICES"])} if "DEVICES" in os.environ else {}),
)
if not torch.distributed.is_initialized() and result is not None:
    # In one piece, for mpirun mixes what its ranks write.
    sys.stdout.write(f"RESULT {result.metrics['train_loss']} {result.world_size}\\n")
"""


MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]

INSTALL = """
from contextlib import nullcontext
from unipar.install.plan import carry_out, check, plan
from unipar_horovod.building import recipe

check(recipe())
carry_out("horovod", plan(recipe()), lambda title: nullcontext(print))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    (tmp_path / "out").mkdir()
    return path


def run(
    script: Path,
    *command: str,
    what: str = "train",
    python: str = sys.executable,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, python, str(script), what, str(script.parent / "out")],
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=150,
    )


def results(done: subprocess.CompletedProcess[str]) -> list[tuple[float, int]]:
    """Loss and world size of each process that has printed them."""
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line[line.index("RESULT") :] for line in done.stdout.splitlines() if "RESULT" in line]
    return [(float(line.split()[1]), int(line.split()[2])) for line in lines]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> float:
    path = tmp_path_factory.mktemp("plain") / "script.py"
    path.write_text(SCRIPT)
    (path.parent / "out").mkdir()
    ((loss, _),) = results(run(path, STRATEGY="single", DEVICES="1"))
    return loss


def test_unipars_own_launcher_and_not_a_word_more(script: Path, expected: float) -> None:
    done = run(script, DEVICES="2")
    assert results(done) == [(pytest.approx(expected, rel=1e-5), 2)]
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


@pytest.mark.parametrize(
    "launcher", ["torchrun", "horovodrun", pytest.param("mpirun", marks=pytest.mark.thorough)]
)
def test_other_launchers(script: Path, expected: float, launcher: str) -> None:
    commands = {
        "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "--no-python"],
        "horovodrun": [str(BIN / "horovodrun"), "--gloo", "-np", "2"],
        "mpirun": MPIRUN,
    }
    if shutil.which(commands[launcher][0]) is None:
        pytest.skip(f"there is no {launcher} here. On Debian: apt-get install openmpi-bin")
    done = run(script, *commands[launcher])
    assert results(done) == [(pytest.approx(expected, rel=1e-5), 2)] * 2


@pytest.fixture(scope="module")
def python_with_mpi(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with all that this one has, but a Horovod that has MPI built in."""
    if shutil.which("mpicxx") is None:
        pytest.skip("there is no mpicxx here. On Debian: apt-get install libopenmpi-dev")
    home = tmp_path_factory.mktemp("mpi")
    venv.create(home, with_pip=False)
    bases = {"base": str(home), "platbase": str(home)}
    theirs = sysconfig.get_path("purelib")
    link = Path(sysconfig.get_path("purelib", vars=bases), "theirs.pth")
    link.write_text(f"import site; site.addsitedir({theirs!r})\n")
    python = str(home / "bin/python")
    installing = subprocess.run(
        [python, "-c", INSTALL],
        env={**os.environ, "HOROVOD_WITH_MPI": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert installing.returncode == 0, installing.stdout + installing.stderr
    return python


@pytest.mark.thorough
@pytest.mark.timeout(1500)  # The wheel is built, unless it is in the cache.
def test_reductions_over_mpi(script: Path, expected: float, python_with_mpi: str) -> None:
    done = run(script, *MPIRUN, python=python_with_mpi, STRATEGY="horovod:transport=mpi")
    assert results(done) == [(pytest.approx(expected, rel=1e-5), 2)] * 2


@pytest.mark.thorough
def test_two_nodes(script: Path, expected: float) -> None:
    """As far as one machine can tell: an agent for each, and one rank on each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [str(BIN / "torchrun"), "--nnodes=2", "--nproc-per-node=1", "--no-python"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    with ThreadPoolExecutor() as pool:
        nodes = [
            pool.submit(run, script, *command, f"--node-rank={node}", GLOO_SOCKET_IFNAME="lo")
            for node in (0, 1)
        ]
        for node in nodes:
            assert results(node.result()) == [(pytest.approx(expected, rel=1e-5), 2)]


@pytest.mark.thorough
def test_a_killed_rank_is_named(script: Path) -> None:
    done = run(script, what="killed", DEVICES="2")
    assert done.returncode == 1
    assert "rank 1" in done.stderr.lower()
    assert "SIGKILL" in done.stderr


def test_a_killed_rank_comes_back_and_the_run_goes_on(script: Path, expected: float) -> None:
    done = run(script, what="restarted", DEVICES="2")
    assert (script.parent / "out" / "was-here").exists()
    assert results(done) == [(pytest.approx(expected, rel=1e-5), 2)]


def test_a_rank_that_does_not_come_is_named(script: Path) -> None:
    done = run(script, what="stuck", DEVICES="2")
    assert done.returncode == 1
    assert "rank 1" in done.stderr.lower()
    assert "time.sleep(600)" in done.stderr
