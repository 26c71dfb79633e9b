"""Optimizer state of one number for a parameter, beside counters of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar import Session
from unipar.data.batch import Batch, MicroBatch
from unipar.testing.pool import WorldPools
from unipar.world import Placement

DATA = torch.randn(6, 2, 4, 3, generator=torch.Generator().manual_seed(0))
KINDS = {"NAdam": torch.optim.NAdam, "ASGD": torch.optim.ASGD}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def squared(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


def by_hand(kind: str) -> list[float]:
    """The plain loop; nothing of unipar in it."""
    net, losses = model(), []
    optimizer = KINDS[kind](net.parameters(), lr=0.05)
    for batch in DATA:
        optimizer.zero_grad()
        loss = squared(net, batch.flatten(0, 1))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(
    placement: Placement, strategy: str, kind: str, directory: str, resume: bool
) -> list[float]:
    half = len(DATA) // 2
    with Session(strategy, placement=placement) as session:
        engine = session.prepare(
            model(), optimizer=lambda named: KINDS[kind]([p for _, p in named], lr=0.05)
        )
        if resume:
            session.load(directory)
        losses = []
        for batch in DATA[half:] if resume else DATA[:half]:
            share = Batch((MicroBatch(batch[placement.rank], 4),), 8)
            losses.append(float(engine.train_step(share, squared).loss))
        if not resume:
            session.save(directory)
        return losses


@pytest.mark.parametrize("kind", [*KINDS])
@pytest.mark.parametrize(("first", "second"), [("fsdp", "fsdp"), ("ddp", "fsdp"), ("fsdp", "ddp")])
def test_it_goes_on_where_parameters_are_divided(
    world_pool: WorldPools, tmp_path: Path, kind: str, first: str, second: str
) -> None:
    expected: Any = by_hand(kind)
    pool = world_pool(2)
    for before, after in zip(
        pool.run(train, first, kind, str(tmp_path), False),
        pool.run(train, second, kind, str(tmp_path), True),
        strict=True,
    ):
        assert before + after == pytest.approx(expected, rel=1e-5)
