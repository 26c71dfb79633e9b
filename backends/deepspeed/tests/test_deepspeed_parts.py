"""A loss that depends on how a batch is divided is told of where DeepSpeed hangs on the model."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from unipar import Session
from unipar.testing.pool import WorldPools
from unipar.world import Placement

pytestmark = pytest.mark.slow

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
WEIGHTS = torch.arange(16.0)


def mean(model: Any, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


def weighted(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch[0]).square().mean(1) * batch[1]).sum() / batch[1].sum()


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def train(placement: Placement, strategy: str, loss: Any) -> tuple[list[str], list[float]]:
    told = Told()
    logging.getLogger("unipar").addHandler(told)
    try:
        with Session(strategy, device="cpu", placement=placement) as session:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
            engine = session.prepare(model, optimizer={"name": "adamw", "lr": 0.01})
            samples = list(zip(X, WEIGHTS, strict=True))
            loader = session.loader(samples, global_batch_size=8, shuffle=False)
            losses = [engine.train_step(batch, loss).loss for batch in loader]
    finally:
        logging.getLogger("unipar").removeHandler(told)
    return [one for one in told.said if "depends on how a batch is divided" in one], losses


def test_a_loss_of_parts_is_told_of_once(world_pool: WorldPools) -> None:
    told, others = [said for said, _ in world_pool(2).run(train, "zero2", weighted)]
    assert len(told) == 1
    assert not others
    [(_, expected), _] = world_pool(2).run(train, "ddp", mean)
    for said, losses in world_pool(2).run(train, "zero2", mean):
        assert not said
        assert losses == pytest.approx(expected, rel=1e-5)


def test_stage_3_is_not_asked_before_it_trains(world_pool: WorldPools) -> None:
    [(_, expected), _] = world_pool(2).run(train, "ddp", weighted)
    for said, losses in world_pool(2).run(train, "zero3", weighted):
        assert not said
        assert losses == pytest.approx(expected, rel=1e-5)
