"""Saving in the background while training goes on."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar import Session, checkpoint
from unipar.checkpoint.files import FileWriter
from unipar.data.batch import Batch, MicroBatch
from unipar.migrate.launchers import command
from unipar.testing.pool import WorldPools
from unipar.world import Placement

WIDTH = 64


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def batch_of(rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return Batch((MicroBatch(torch.randn(2, WIDTH, generator=generator), 2),), 4)


def files_of(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def train_meanwhile(placement: Placement, strategy: str, directory: Path) -> None:
    """Save at step 3 both ways; train before, while and after the background one writes."""
    write, gate = FileWriter.write, threading.Event()

    def gated_write(self: FileWriter, data: memoryview, start: int) -> list[str]:
        assert gate.wait(timeout=30)
        return write(self, data, start)

    with Session(strategy, device="cpu", placement=placement) as session:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        engine = session.prepare(
            model, optimizer=lambda named: torch.optim.AdamW([p for _, p in named])
        )
        engines, world = session.engines, session.world

        def train(*steps: int) -> None:
            for step in steps:
                engine.train_step(batch_of(world.rank, step), loss_of)

        train(0, 1, 2)
        checkpoint.save(directory / "now", engines, world, step=3)
        FileWriter.write = gated_write
        try:
            pending = checkpoint.save_async(directory / "later", engines, world, step=3)
            train(3, 4, 5)
            assert not pending.done()
            assert checkpoint.newest(directory / "later") is None
            gate.set()
            # From here on the collectives of both are under way at once.
            train(6, 7, 8)
            path = pending.wait()
        finally:
            gate.set()
            FileWriter.write = write
        assert pending.done()
        assert path == directory / "later" / "step-00000003"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ddp:shard_optimizer=true"])
def test_equals_a_save_of_the_same_moment(
    strategy: str, world_pool: WorldPools, tmp_path: Path
) -> None:
    world_pool(2).run(train_meanwhile, strategy, tmp_path)
    now, later = (files_of(tmp_path / which / "step-00000003") for which in ("now", "later"))
    assert now == later
    assert "manifest.json" in now


def two_saves(placement: Placement, directory: Path) -> list[str]:
    """A second save waits for the first, whichever kind it is."""
    with Session("ddp", device="cpu", placement=placement) as session:
        session.prepare(nn.Linear(4, 4))
        engines, world = session.engines, session.world
        for step in range(1, 4):
            checkpoint.save_async(directory, engines, world, step=step)
        checkpoint.save(directory, engines, world, step=4)
        return [path.name for path in checkpoint.checkpoints(directory)]


def test_a_save_waits_for_the_one_before(world_pool: WorldPools, tmp_path: Path) -> None:
    for names in world_pool(2).run(two_saves, tmp_path):
        assert names == [f"step-{step:08d}" for step in range(1, 5)]


LOST = """\
import os, sys, time
import torch
from unipar import CheckpointError, Session, checkpoint
from unipar.checkpoint.files import FileWriter

with Session("ddp", device="cpu") as session:
    session.prepare(torch.nn.Linear(4, 4))
    engines, world = session.engines, session.world
    checkpoint.save_async(sys.argv[1], engines, world, step=1).wait()
    if world.rank == 1:
        FileWriter.write = lambda *_: time.sleep(60)
    pending = checkpoint.save_async(sys.argv[1], engines, world, step=2)
    if world.rank == 1:
        os._exit(7)
    try:
        pending.wait()
    except CheckpointError as error:
        print(error, "|", *(path.name for path in checkpoint.checkpoints(sys.argv[1])), flush=True)
    os._exit(0)
"""


@pytest.mark.timeout(60)
def test_a_rank_that_is_lost_meanwhile_is_told_in_words(
    forked_programs: None, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOST)
    done = subprocess.run(
        [*command("torchrun", 2), str(script), str(tmp_path / "saved")],
        capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert done.returncode == 7
    told, complete = done.stdout.splitlines()[-1].split(" | ")
    assert told.startswith("Another rank ended, or did not answer, while the checkpoint was")
    assert complete == "step-00000001"
    # The thread has said so when it happened, and no more than that.
    assert f"The checkpoint of step 2 failed: {told}" in done.stderr
    assert "gloo" not in done.stderr
