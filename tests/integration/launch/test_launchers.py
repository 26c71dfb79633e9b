"""Processes that a launcher has started find each other by its variables, for every run."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile

import pytest
from outputs import own

pytestmark = pytest.mark.timeout(120)

JOIN = """
import os
import torch
import torch.distributed as dist
from unipar.launch import detect
from unipar.world import joined

placement = detect()
for run in range(3):
    with joined(placement) as world:
        total = torch.ones(1) * (world.rank + 1)
        dist.all_reduce(total)
line = f"{world.rank} {world.size} {world.local_rank} {total.item()}\\n"
# In one piece, for ranks may share a pipe.
os.write(1, line.encode())
"""
OTHER = """
import os
import unipar.world.network as network

found = network.own_versions()
if os.environ["RANK"] == os.environ["OTHER"]:
    network.own_versions = lambda: found | {"torch": "2.7.9"}
"""
LAUNCHERS = re.compile(r"^(SLURM|OMPI|PMI|PMIX|MPI|TORCHELASTIC)_|^(RANK|LOCAL_RANK|WORLD_SIZE)$")


def started(per_rank: list[dict[str, str]], script: str) -> list[tuple[str, str]]:
    """Run a script once for each environment, at the same time; output and errors of each."""
    base = {name: value for name, value in os.environ.items() if not LAUNCHERS.match(name)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env=base | variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for variables in per_rank
    ]
    return [process.communicate(timeout=60) for process in processes]


def together(per_rank: list[dict[str, str]]) -> list[str]:
    """The same of the script above, which fails nowhere."""
    outputs = started(per_rank, JOIN)
    assert [error for _, error in outputs] == ["", ""]
    return [own(out).strip() for out, _ in outputs]


def test_srun():
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

    assert together([variables(0), variables(1)]) == ["0 2 0 3.0", "1 2 1 3.0"]


@pytest.mark.parametrize("other", [0, 1])
def test_ranks_of_different_versions_all_refuse(other: int):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place["OTHER"] = str(other)
    ranks = [place | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    for out, error in started(ranks, OTHER + JOIN):
        assert out == "", error
        assert "ConfigError: the ranks of this run have different versions:\n  torch: " in error
        assert re.search(rf"2\.7\.9 on \S+ \(rank {other}\)", error)


def test_mpirun():
    def variables(rank: int) -> dict[str, str]:
        return {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_NAMESPACE": "prterun-host-1@1",
            "PMIX_SERVER_TMPDIR": tempfile.gettempdir(),
        }

    assert together([variables(0), variables(1)]) == ["0 2 0 3.0", "1 2 1 3.0"]


def test_torchrun(tmp_path):
    path = tmp_path / "join.py"
    path.write_text(JOIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--log-dir", str(tmp_path / "logs")]
    done = subprocess.run(
        [*command, "--nproc-per-node=2", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # Ranks share a pipe, and gloo of torch 2.8 writes to it in pieces that fall into each other.
    assert sorted(re.findall(r"\d 2 \d 3\.0\n", done.stdout)) == ["0 2 0 3.0\n", "1 2 1 3.0\n"]
    assert done.returncode == 0
