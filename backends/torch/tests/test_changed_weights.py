"""Models whose forward pass changes weights, under FSDP: refused, or kept where that is sound."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from unipar.errors import ConfigError
from unipar.strategy import EngineSpec, Strategy
from unipar.strategy.registry import resolve
from unipar.testing.harness import on_strategy
from unipar.testing.pool import WorldPools
from unipar.world import World


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4, max_norm=0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens)


class PastTheCount(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.weight.data.mul_(0.5)
        return super().forward(input)


def calls(strategy: Strategy, world: World, model: nn.Module, given: torch.Tensor) -> str:
    sgd = lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)  # noqa: E731
    engine = strategy.prepare(EngineSpec(model, sgd), world)
    try:
        engine(given)
    except ConfigError as error:
        return str(error)
    finally:
        engine.close()
    return ""


@pytest.mark.parametrize(
    ("model", "given", "name"),
    [
        (Renormed(), torch.arange(8), "'embedding.weight'"),
        (PastTheCount(4, 2), torch.ones(3, 4), "'weight'"),
        (nn.Sequential(PastTheCount(4, 2)), torch.ones(3, 4), "'0.weight'"),
    ],
    ids=["max_norm", "data", "data of a part"],
)
def test_a_change_that_would_be_lost_is_refused(
    model: Any, given: torch.Tensor, name: str, world_pool: WorldPools
) -> None:
    make = lambda: resolve("fsdp")  # noqa: E731
    for said in world_pool(2).run(on_strategy, make, calls, (model, given)):
        assert f"the weights {name} were changed" in said
        assert "strategy='ddp'" in said
