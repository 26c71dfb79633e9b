"""Hosts with disks of their own keep each other's files in memory, and go on when one is lost."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from unipar import CheckpointError, Session, checkpoint
from unipar.checkpoint import peers
from unipar.config import CheckpointConfig
from unipar.data.batch import Batch, MicroBatch
from unipar.testing.pool import WorldPools
from unipar.train import resuming
from unipar.train.checkpointing import Saver
from unipar.world import Placement


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - 1).square().mean()


class Host:
    """A host of one rank, which has a disk and a memory of its own below a directory."""

    def __init__(self, placement: Placement, root: Path, num_peers: int, name: int | None = None):
        self.placement = dataclasses.replace(
            placement,
            node_rank=placement.rank,
            num_nodes=placement.size,
            local_rank=0,
            local_size=1,
        )
        own = root / f"host{placement.rank if name is None else name}"
        self.disk, self.memory = own / "disk", own / "memory"
        self.memory.mkdir(parents=True, exist_ok=True)
        peers.MEMORY = self.memory
        settings = {"directory": f"file://{root}/there", "every_steps": 2, "peers": num_peers}
        self.config = CheckpointConfig.model_validate(settings)
        self.job: Any = SimpleNamespace(
            checkpoint_dir=self.disk, remote=self.config.remote, output_dir=root
        )

    def session(self, strategy: str) -> Session:
        return Session(strategy, device="cpu", placement=self.placement)

    def lose(self) -> None:
        shutil.rmtree(self.disk)
        shutil.rmtree(self.memory)
        self.memory.mkdir()

    @property
    def files(self) -> list[str]:
        """Of the checkpoints in memory."""
        return sorted(p.name for p in self.memory.rglob("*/step-*/**/*.safetensors"))


def prepared(session: Session) -> Any:
    torch.manual_seed(0)
    return session.prepare(
        nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named]),
    )


def train(engine: Any, steps: range, saver: Saver | None = None) -> list[float]:
    losses = []
    for step in steps:
        batch = Batch((MicroBatch(torch.ones(2, 64) * step, 2),), 2 * engine.world.size)
        losses.append(engine.train_step(batch, loss_of).loss)
        if saver is not None:
            saver.collect()
            if saver.due(step):
                saver.save(step, {}, {})
    return losses


def lose_hosts(
    placement: Placement, root: Path, num_peers: int, lost: tuple[int, ...], strategy: str
) -> dict[str, Any]:
    """Train to step 7 with saves at 2, 4 and 6; some hosts are lost; go on from 6."""
    host = Host(placement, root, num_peers)
    with host.session(strategy) as session:
        engine = prepared(session)
        saver = Saver(host.disk, host.config, session)
        whole = train(engine, range(1, 8), saver)
        saver.wait()
        checkpoint.wait_for_pending()
        held = host.files
        assert saver.wait_for_copies() is None
        whole += train(engine, range(8, 10))
    with host.session(strategy) as session:
        # As if the run had failed before its end, where memory is given back.
        engine = prepared(session)
        saver = Saver(host.disk, host.config, session)
        released = not host.files
        train(engine, range(1, 7), saver)
        saver.wait()
        checkpoint.wait_for_pending()
        saver.close()
        session.world.barrier()
    with host.session(strategy) as session:
        if placement.rank in lost:
            host.lose()
        if placement.rank == 0:
            for path in (root / "there").rglob("*.safetensors"):
                path.unlink()
        session.world.barrier()
        engine = prepared(session)
        try:
            manifest = resuming.load("auto", host.job, session.engines, session.world)
        except CheckpointError as error:
            return {"error": str(error)}
        assert manifest is not None
        again = train(engine, range(manifest.step + 1, 10))
    return {
        "held": held,
        "released": released,
        "step": manifest.step,
        "same": again == whole[manifest.step :],
    }


@pytest.mark.parametrize("strategy", ["ddp:shard_optimizer=true", "fsdp"])
def test_a_run_that_has_lost_a_host_goes_on_without_the_url(
    strategy: str, world_pool: WorldPools, tmp_path: Path
) -> None:
    results = world_pool(2).run(lose_hosts, tmp_path, 1, (1,), strategy)
    for rank, result in enumerate(results):
        assert result["held"]
        assert all(f"rank-{1 - rank:05d}" in name for name in result["held"])
        assert result["released"]
        assert (result["step"], result["same"]) == (6, True)


def test_what_no_memory_holds_is_read_from_the_url(world_pool: WorldPools, tmp_path: Path) -> None:
    """The counterpart: here the files that were taken away there are missed."""
    results = world_pool(2).run(lose_hosts, tmp_path, 1, (0, 1), "fsdp")
    assert all("checkpoints in file://" in result["error"] for result in results)
