"""A disk that fills up on one rank: all ranks say so, and nothing that was good is lost."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar import CheckpointError, Session, checkpoint
from unipar.data.batch import Batch, MicroBatch
from unipar.testing.pool import WorldPools
from unipar.world import Placement

WIDTH = 512
LIMIT = 256 << 10  # bytes; less than a rank's half of the weights


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def batch_of(rank: int, step: int) -> Batch:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return Batch((MicroBatch(torch.randn(2, WIDTH, generator=generator), 2),), 4)


def fill_up(
    placement: Placement, directory: Path, full_ranks: tuple[int, ...], in_background: bool
) -> tuple[str, list[float], list[float]]:
    """Train, save; train, fail to save; train on. Then the same from the good checkpoint."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Session("fsdp", device="cpu", placement=placement) as session:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        engine = session.prepare(
            model, optimizer=lambda named: torch.optim.AdamW([p for _, p in named])
        )
        rank, losses = session.world.rank, []

        def train(step: int) -> None:
            losses.append(engine.train_step(batch_of(rank, step), loss_of).loss)

        train(0)
        good = session.save(directory, step=1)
        train(1)
        if rank in full_ranks:
            # What the kernel says of a full disk is ENOSPC; of a file past its limit, EFBIG.
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, unlimited[1]))
        try:
            if in_background:
                checkpoint.save_async(directory, session.engines, session.world, step=2).wait()
            else:
                session.save(directory, step=2)
            message = "no error"
        except CheckpointError as error:
            message = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        train(2)
        session.world.barrier()
        assert checkpoint.newest(directory) == good
        assert [path.name for path in directory.iterdir()] == [good.name]
        checkpoint.verify(good)
        session.load(directory)
        undisturbed, losses = losses, losses[:1]
        train(1)
        train(2)
        session.save(directory, step=2)
        session.world.barrier()
        assert checkpoint.newest(directory) == directory / "step-00000002"
    return message, undisturbed, losses


@pytest.mark.parametrize("in_background", [False, True], ids=["save", "save_async"])
@pytest.mark.parametrize("full_ranks", [(1,), (0,), (0, 1)], ids=str)
def test_all_ranks_tell_which_disk_is_full_and_train_on(
    full_ranks: tuple[int, ...], in_background: bool, world_pool: WorldPools, tmp_path: Path
) -> None:
    results = world_pool(2).run(fill_up, tmp_path, full_ranks, in_background)
    for message, undisturbed, again in results:
        assert f"rank {full_ranks[0]}" in message
        assert "step 2" in message
        assert "File too large" in message
        assert f"rank-{full_ranks[0]:05d}.safetensors" in message
        assert "step-00000001" in message
        assert again == undisturbed


def save_into(placement: Placement, directory: Path) -> str:
    with Session("ddp", device="cpu", placement=placement) as session:
        session.prepare(nn.Linear(2, 2))
        with pytest.raises(CheckpointError) as caught:
            session.save(directory, step=1)
    return str(caught.value)


def test_names_a_directory_that_cannot_be_made(world_pool: WorldPools, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    messages = world_pool(2).run(save_into, tmp_path / "file" / "checkpoints")
    assert len(set(messages)) == 1
    assert str(tmp_path / "file") in messages[0]
    assert "Not a directory" in messages[0]
