"""Several runs in the same processes: each meets for itself, whatever the one before has left."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from outputs import own

from unipar.strategy import registry
from unipar.testing.pool import WorldPools
from unipar.world import Placement, joined

RUNS = """
import os, sys
from pathlib import Path
import torch
from torch import nn
from unipar import fit

def loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])

samples = [(torch.randn(4), torch.randn(2)) for _ in range(8)]
for number, strategy in enumerate(sys.argv[2:]):
    torch.manual_seed(0)
    fit(nn.Linear(4, 2), samples, strategy=strategy, loss=loss, global_batch_size=4, steps=2,
        device="cpu", output_dir=Path(sys.argv[1], str(number)), checkpoint=False,
        progress=False, log_level="error", timeout=30)
    if os.environ["RANK"] == "0":
        print(strategy, flush=True)
"""
MIXED = ["ddp", "horovod", "zero1", "fsdp", "accelerate", "ddp", "zero1", "horovod"]


def run(directory: Path, strategies: list[str]) -> None:
    path = directory / "runs.py"
    path.write_text(RUNS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--log-dir", str(directory / "logs"), "--nproc-per-node=2", str(path)]
    done = subprocess.run(
        [*command, str(directory / "out"), *strategies],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert own(done.stdout).split() == strategies, done.stderr
    assert done.returncode == 0


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("time", range(5))
def test_eight_runs_of_changing_frameworks_in_one_torchrun(tmp_path: Path, time: int):
    here = [name for name in MIXED if registry.strategy_class(name).availability().ok]
    # Another rank is ahead, and another framework first, each time.
    turned = here[time:] + here[:time]
    run(tmp_path, (turned * 8)[:8])


def test_a_rank_that_does_not_come_is_named_with_the_run_it_is_at(world_pool: WorldPools):
    def task(placement: Placement) -> str:
        with joined(placement):
            pass
        if placement.rank == 1:
            return ""
        try:
            with joined(dataclasses.replace(placement, timeout=1.0)):
                return "joined"
        except dist.DistStoreError as error:
            return str(error)

    message, _ = world_pool(2).run(task)
    assert "rank 0 of 2 waited for the others to begin run 2 of these processes" in message
    assert "Rank 1 has begun 1 of them." in message
    assert "also after a run that failed on some ranks only" in message
