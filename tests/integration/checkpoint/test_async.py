"""Saving in the background while training goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar import Session, checkpoint
from unipar.batch import Batch, MicroBatch
from unipar.checkpoint import commit
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


def train_meanwhile(placement: Placement, strategy: str, directory: Path) -> tuple[int, float, Any]:
    """Save at step 3 both ways; the background one writes while three steps are taken."""
    write = commit.FileWriter.write

    def slow_write(self: Any, data: memoryview, start: int) -> list[str]:
        time.sleep(0.02)
        return write(self, data, start)

    with Session(strategy, device="cpu", placement=placement) as session:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        engine = session.prepare(
            model, optimizer=lambda named: torch.optim.AdamW([p for _, p in named])
        )
        engines, world = session.engines, session.world
        for step in range(3):
            engine.train_step(batch_of(world.rank, step), loss_of)
        checkpoint.save(directory / "now", engines, world, step=3)
        commit.FileWriter.write = slow_write
        try:
            began = time.monotonic()
            pending = checkpoint.save_async(directory / "later", engines, world, step=3)
            returned = time.monotonic() - began
            steps = 0
            while not pending.done() and steps < 3:
                engine.train_step(batch_of(world.rank, 3 + steps), loss_of)
                steps += 1
            # Both groups' collectives are under way at once.
            finished = pending.done()
            path = pending.wait()
        finally:
            commit.FileWriter.write = write
        assert path == directory / "later" / "step-00000003"
        return steps, returned, finished


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "ddp:shard_optimizer=true"])
def test_equals_a_save_of_the_same_moment(
    strategy: str, world_pool: WorldPools, tmp_path: Path
) -> None:
    results = world_pool(2).run(train_meanwhile, strategy, tmp_path)
    for steps, returned, finished in results:
        assert steps == 3, "it was written before training went on"
        assert not finished
        assert returned < 0.2, "it waited for the slow disk"
    now, later = (files_of(tmp_path / which / "step-00000003") for which in ("now", "later"))
    assert now == later


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
