"""Hosts with disks of their own keep each other's files in memory, and go on when one is lost."""

from __future__ import annotations

import dataclasses
import logging
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from unipar import CheckpointError, ConfigError, Session, checkpoint
from unipar.checkpoint import RemoteDirectory, peers
from unipar.checkpoint.pieces import Pieces
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

    def __init__(self, placement: Placement, root: Path, number: int, num_peers: int) -> None:
        self.placement = dataclasses.replace(
            placement,
            node_rank=placement.rank,
            num_nodes=placement.size,
            local_rank=0,
            local_size=1,
        )
        self.root, self.url = root, f"file://{root}/there"
        self.disk, self.memory = root / f"disk{number}", root / f"memory{number}"
        self.memory.mkdir(parents=True, exist_ok=True)
        peers.MEMORY = self.memory
        settings = {"directory": self.url, "every_steps": 2, "peers": num_peers}
        self.config = CheckpointConfig.model_validate(settings)
        self.job: Any = SimpleNamespace(
            checkpoint_dir=self.disk, remote=self.config.remote, output_dir=root
        )

    def session(self, strategy: str) -> Session:
        return Session(strategy, device="cpu", placement=self.placement)

    @property
    def held(self) -> list[str]:
        """The files of checkpoints in its memory."""
        return sorted(str(p.relative_to(self.memory)) for p in self.memory.rglob("*.safetensors"))


def prepared(session: Session) -> Any:
    torch.manual_seed(0)
    return session.prepare(
        nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)),
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named]),
    )


def train(engine: Any, steps: range, saver: Saver | None = None) -> list[float]:
    losses = []
    for step in steps:
        rows = 12 // engine.world.size
        batch = Batch((MicroBatch(torch.ones(rows, 64) * step, rows),), 12)
        losses.append(engine.train_step(batch, loss_of).loss)
        if saver is not None:
            saver.collect()
            if saver.due(step, {}):
                saver.save(step, {}, {})
    return losses


def wait_for(url: str, step: int) -> None:
    deadline = time.monotonic() + 120
    while step not in RemoteDirectory(url).steps():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def fail(
    placement: Placement, root: Path, num_peers: int, strategy: str
) -> tuple[list[float], list[str]]:
    """Save at steps 2, 4 and 6, and fail after 9: the losses, and what this host keeps."""
    host = Host(placement, root, placement.rank, num_peers)
    with host.session(strategy) as session:
        engine = prepared(session)
        saver = Saver(host.disk, host.config, session)
        losses = train(engine, range(1, 7), saver) + train(engine, range(7, 10))
        checkpoint.wait_for_pending()
        wait_for(host.url, 6)
        saver.close()
        session.world.barrier()
    return losses, host.held


def go_on(
    placement: Placement, root: Path, hosts: tuple[int, ...], num_peers: int, strategy: str
) -> tuple[int, list[float]] | str:
    """Resume on these hosts, and end the run at step 9: the step, and the losses after it."""
    host = Host(placement, root, hosts[placement.rank], num_peers)
    with host.session(strategy) as session:
        engine = prepared(session)
        saver = Saver(host.disk, host.config, session)
        try:
            manifest = resuming.load("auto", host.job, session.engines, session.world)
        except CheckpointError as error:
            return str(error)
        assert manifest is not None
        # Disks of real hosts have one name. Here ranks have all read that of rank 0.
        own = host.disk / manifest.path.name
        checkpoint.verify(own)
        saver.take_over(dataclasses.replace(manifest, path=own))
        losses = train(engine, range(manifest.step + 1, 10), saver)
        saver.finish(9, {}, {})
        assert saver.wait_for_copies() is None
        saver.close()
    return manifest.step, losses


def lose(root: Path, *hosts: int) -> None:
    for host in hosts:
        shutil.rmtree(root / f"disk{host}")
        shutil.rmtree(root / f"memory{host}")


def empty(there: Path) -> None:
    """Leave nothing to read where the URL leads, of checkpoints that are listed there."""
    for path in there.rglob("*.safetensors"):
        path.unlink()


@pytest.mark.parametrize("strategy", ["ddp:shard_optimizer=true", "fsdp"])
def test_a_run_that_has_lost_a_host_goes_on_without_the_url(
    strategy: str, world_pool: WorldPools, tmp_path: Path
) -> None:
    pool = world_pool(2)
    whole = pool.run(fail, tmp_path, 1, strategy)
    losses = whole[0][0]
    for rank, (same, held) in enumerate(whole):
        assert same == losses
        assert held
        assert all(
            "step-00000006/model" in name and f"rank-{1 - rank:05d}" in name for name in held
        )
    lose(tmp_path, 1)
    empty(tmp_path / "there")
    assert pool.run(go_on, tmp_path, (0, 1), 1, strategy) == [(6, losses[6:])] * 2
    assert not list(tmp_path.glob("memory*/*"))
    with checkpoint.fetched(f"file://{tmp_path}/there") as path:
        assert checkpoint.verify(path).step == 9


def test_what_no_memory_holds_is_read_from_the_url(world_pool: WorldPools, tmp_path: Path) -> None:
    pool = world_pool(2)
    losses = pool.run(fail, tmp_path, 1, "fsdp")[0][0]
    # A wrong byte in the memory of one host, and the disk of the other is gone.
    file = next((tmp_path / "memory0").rglob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    lose(tmp_path, 1)
    assert pool.run(go_on, tmp_path, (0, 1), 0, "fsdp") == [(6, losses[6:])] * 2
    lose(tmp_path, 0, 1)
    empty(tmp_path / "there")
    assert "there can be read" in pool.run(go_on, tmp_path, (0, 1), 0, "fsdp")[0]


@pytest.mark.thorough
@pytest.mark.parametrize(("num_peers", "left"), [(1, (0, 2)), (1, (2, 5, 0)), (2, (1,))])
def test_of_three_hosts_those_that_are_left_go_on(
    num_peers: int, left: tuple[int, ...], world_pool: WorldPools, tmp_path: Path
) -> None:
    """With a new one, too, and in another order; and one alone that has what two others had."""
    losses = world_pool(3).run(fail, tmp_path, num_peers, "fsdp")[0][0]
    lose(tmp_path, *{0, 1, 2}.difference(left))
    empty(tmp_path / "there")
    results = world_pool(len(left)).run(go_on, tmp_path, left, 0, "fsdp")
    for step, rest in results:
        assert step == 6
        assert rest == pytest.approx(losses[6:], rel=1e-5)


def fill_up(placement: Placement, root: Path) -> tuple[list[float], list[str], list[str]]:
    """A run in which one host's memory is full: losses, what is held, and what was said."""
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("unipar").addHandler(handler)
    left = peers._left
    try:
        peers._left = (lambda: 1.0) if placement.rank == 1 else left
        losses, held = fail(placement, root, 1, "fsdp")
    finally:
        peers._left = left
        logging.getLogger("unipar").removeHandler(handler)
    return losses, held, texts


def test_training_outlives_a_memory_that_is_full(world_pool: WorldPools, tmp_path: Path) -> None:
    (losses, held, texts), other = world_pool(2).run(fill_up, tmp_path)
    assert losses == other[0]
    assert not held
    assert [text for text in texts if "not in other hosts' memory" in text] == texts
    assert len(texts) == 1
    assert "MiB would go there, and host" in texts[0]


def tear(placement: Placement, root: Path) -> tuple[list[str], list[str]]:
    """A run whose copies of step 6 do not arrive: the steps in memory, and on the disk."""
    take = Pieces.take

    def torn(self: Pieces, path: Path, piece: torch.Tensor) -> None:
        if "step-00000006" in str(path):
            self.error = "no space"
        else:
            take(self, path, piece)

    Pieces.take = torn
    try:
        _, held = fail(placement, root, 1, "fsdp")
    finally:
        Pieces.take = take
    steps = sorted({Path(name).parts[1] for name in held})
    return steps, sorted(path.name for path in (root / f"disk{placement.rank}").iterdir())


def test_what_memory_holds_stays_on_the_disks_until_the_next_is_there(
    world_pool: WorldPools, tmp_path: Path
) -> None:
    """A host that is lost while files are sent leaves one checkpoint whole."""
    expected = ["step-00000004"], ["step-00000004", "step-00000006"]
    assert world_pool(2).run(tear, tmp_path) == [expected] * 2


def begin(placement: Placement, root: Path, disk: int | None, memory: int | None) -> str:
    """Why a run with hosts that share a disk or memory, or are one, cannot begin."""
    host = Host(placement, root, placement.rank, 1)
    host.disk = root / f"disk{placement.rank if disk is None else disk}"
    peers.MEMORY = root / f"memory{placement.rank if memory is None else memory}"
    with host.session("ddp") as session:
        prepared(session)
        with pytest.raises(ConfigError) as refused:
            Saver(host.disk, host.config, session)
    return str(refused.value)


def test_where_no_host_could_help_another_it_is_refused(
    world_pool: WorldPools, tmp_path: Path
) -> None:
    with pytest.raises(ValidationError, match="Give a URL"):
        CheckpointConfig.model_validate({"peers": 1})
    for size, disk, memory, text in (
        (1, None, None, "this run is on one host. Set checkpoint.peers=0"),
        (2, 0, None, "write to one disk that they share"),
        (2, None, 0, "they are one machine"),
    ):
        results = world_pool(size).run(begin, tmp_path, disk, memory)
        assert all(text in result for result in results)


def begin_afresh(placement: Placement, root: Path) -> int | None:
    host = Host(placement, root, placement.rank, 0)
    with host.session("fsdp") as session:
        prepared(session)
        assert resuming.load(None, host.job, session.engines, session.world) is None
        manifest = resuming.load("auto", host.job, session.engines, session.world)
        return manifest and manifest.step


def test_a_new_run_does_not_find_what_another_has_left(
    world_pool: WorldPools, tmp_path: Path
) -> None:
    pool = world_pool(2)
    pool.run(fail, tmp_path, 1, "fsdp")
    for name in ("there", "disk0", "disk1"):
        shutil.rmtree(tmp_path / name)
    assert pool.run(begin_afresh, tmp_path) == [None, None]
