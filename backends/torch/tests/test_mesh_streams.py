"""The random numbers that ranks draw after a checkpoint: alike where they hold parts of the same
layers, and nowhere else."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
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


def drawn_on_host(placement: Placement, strategy: str) -> tuple[float, float]:
    """What a rank draws from generators that it has seeded for itself."""
    with unipar.Session(strategy, device="cpu", placement=placement) as session:
        random.seed(placement.rank)
        np.random.seed(placement.rank)
        session.prepare(models.Decoder, optimizer="sgd")
        return random.random(), np.random.rand()


@pytest.mark.parametrize(("strategy", "same"), [("mesh:tp=2", True), ("ddp", False)])
def test_pythons_and_numpys_numbers_are_alike_where_ranks_hold_parts_of_the_same_layers(
    strategy: str, same: bool, world_pool: WorldPools
) -> None:
    first, second = world_pool(2).run(drawn_on_host, strategy)
    assert first == (random.Random(0).random(), np.random.RandomState(0).rand())
    assert (first == second) == same
