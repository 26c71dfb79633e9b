"""The random numbers that ranks draw after a checkpoint: alike where they hold parts of the same
layers, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import unipar
from unipar.testing import models
from unipar.testing.pool import WorldPools
from unipar.world import Placement


def drawn(placement: Placement, strategy: str, directory: Path, resumed: bool) -> list[float]:
    """What a rank draws after it has written a checkpoint, or has read one."""
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        session.prepare(models.Decoder, optimizer="sgd")
        if resumed:
            session.load(directory)
        else:
            session.save(directory, step=1)
        return nn.functional.dropout(torch.ones(64)).tolist()


@pytest.mark.parametrize(
    ("saved", "loaded", "same"),
    [
        ("mesh:pp=2", "mesh:pp=2", True),
        ("mesh:tp=2", "mesh:tp=2", True),
        ("mesh:tp=2", "ddp", False),
        ("ddp", "mesh:tp=2", False),
    ],
)
def test_dropout_after_a_checkpoint_differs_between_stages_and_replicas_alone(
    saved: str, loaded: str, same: bool, world_pool: WorldPools, tmp_path: Path
) -> None:
    before = world_pool(2).run(drawn, saved, tmp_path, False)
    first, second = world_pool(2).run(drawn, loaded, tmp_path, True)
    assert (first == second) == (loaded == "mesh:tp=2")
    assert ([first, second] == before) == same
