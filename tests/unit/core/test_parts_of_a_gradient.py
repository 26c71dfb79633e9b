"""What one rank adds to a gradient does not depend on how many ranks there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from unipar.data.batch import Batch, MicroBatch
from unipar.engine import StepEngine, build_optimizer
from unipar.layout import Layout
from unipar.loss import LossSum
from unipar.strategy import EngineSpec
from unipar.world import LossReduction, Placement, World

ITEMS = 8
X = torch.arange(6.0).reshape(3, 2)


class Unheard(World):
    """One of several ranks, without the others: it is as if they had the items that are missing."""

    def start_reduce_loss(
        self, total: Any, count: Any, scale: float = 1.0, fingerprint: int = 0
    ) -> LossReduction:
        return LossReduction(self, total, ITEMS, scale)

    def gather(self, value: Any, axis: str | None = None) -> list[Any]:
        return [value] * self.size


def mean(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()


def terms(model: Any, x: torch.Tensor) -> LossSum:
    return LossSum(model(x).sum(), len(x))


@pytest.mark.parametrize("layout", [Layout(dp_replicate=4), Layout(dp_shard=2, tp=2)])
@pytest.mark.parametrize("loss", [mean, terms])
def test_only_the_number_of_items_divides(layout: Layout, loss: Any) -> None:
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    spec = EngineSpec(model, optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=1.0))
    world = Unheard(Placement(rank=1, size=4), layout)
    engine = StepEngine(spec, world, model, build_optimizer(spec, model))
    engine.train_step(Batch((MicroBatch(X, 3),), ITEMS), loss)
    torch.testing.assert_close(before - model.weight.detach(), X.sum(0, keepdim=True) / ITEMS)
