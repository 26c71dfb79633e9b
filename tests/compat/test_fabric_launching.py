"""Processes that a script for Fabric starts itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.usefixtures("forked_programs"), pytest.mark.slow, pytest.mark.timeout(300),
]  # fmt: skip

SCRIPT = """
import random
import sys
import time
from pathlib import Path
import numpy
import torch
from unipar.compat.fabric import Fabric
from unipar.compat.fabric.utilities import AttributeDict, is_shared_filesystem
from unipar.errors import ConfigError

def drawn():
    return torch.rand(1).item(), random.random(), numpy.random.rand()

def main(fabric, steps, goes_on):
    assert drawn() == goes_on, "generators are where the script has left them"
    fabric.seed_everything(0, verbose=False)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3) + fabric.global_rank).square().mean()
        fabric.backward(loss)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        evaluated = fabric.all_gather(model(torch.ones(1, 3)))
    assert torch.equal(evaluated[0], evaluated[1]), "as with DDP, with rank 0's statistics"
    around = ""
    try:
        fabric.backward(model.module(torch.ones(4, 3)).mean())
    except ConfigError as error:
        around = str(error)
    assert "the loss was computed around it, as by model.module(" in around
    assert is_shared_filesystem(fabric.strategy)
    assert not is_shared_filesystem(path=f"/rank{fabric.global_rank}")
    ranks = fabric.all_reduce(AttributeDict(rank=fabric.global_rank), reduce_op="sum")
    assert ranks.rank.item() == 1
    waits, new_group = [], torch.distributed.new_group
    torch.distributed.new_group = lambda **how: waits.append(how["timeout"]) or new_group(**how)
    with fabric.rank_zero_first():
        if fabric.global_rank == 0:
            time.sleep(0.2)
            Path("there").touch()
        assert Path("there").exists()
    assert waits[0].days > 365, "however long it takes"
    return fabric.world_size, round(fabric.all_reduce(loss.detach()).item(), 6)

fabric = Fabric(accelerator="cpu", devices=2, strategy=sys.argv[1])
fabric.seed_everything(7, verbose=False)
goes_on = drawn()
fabric.seed_everything(7, verbose=False)
size, loss = fabric.launch(main, 3, goes_on)
# In one piece, for another rank may write at the same time.
sys.stdout.write(f"told {sys.argv[1]} {size} {loss}\\n")
sys.stdout.flush()
"""


# `python` starts the ranks by torchrun, which the corpus of migrated programs proves as well.
@pytest.mark.parametrize(
    ("strategy", "times", "runs"),
    [
        ("ddp_spawn", 1, ""),
        pytest.param("ddp_spawn", 1, "fsdp", marks=pytest.mark.thorough),
        pytest.param("ddp", 2, "", marks=pytest.mark.thorough),
    ],
)
def test_a_script_starts_its_processes(
    strategy: str, times: int, runs: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "train.py", strategy], cwd=tmp_path, capture_output=True, text=True,
        timeout=200, env={
            # Unbuffered, the ranks' lines would come in pieces, one between the other's.
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "",
            **({"UNIPAR_STRATEGY": runs} if runs else {}),
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [line.split()[2:] for line in done.stdout.splitlines() if line.startswith("told")]
    assert len(told) == times
    assert all(one == told[0] and one[0] == "2" for one in told)
