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


class Moving(nn.Linear):
    """Its weight is as it was, and no longer where it is gathered."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.weight.data = self.weight.data.clone()
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
        (Moving(4, 2), torch.ones(3, 4), "'weight'"),
    ],
    ids=["max_norm", "data", "data of a part", "moved"],
)
def test_a_change_that_would_be_lost_is_refused(
    model: Any, given: torch.Tensor, name: str, world_pool: WorldPools
) -> None:
    make = lambda: resolve("fsdp")  # noqa: E731
    for said in world_pool(2).run(on_strategy, make, calls, (model, given)):
        assert f"the weights {name} were changed" in said
        assert "strategy='ddp'" in said


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.flatten_parameters()
        return self.layer(x)[0]


def moves_its_weights(strategy: Strategy, world: World) -> tuple[list[str], list[str]]:
    """What is called for the weights while an engine is open, and when it is closed."""
    model, called = Recurrent(), []
    own = nn.GRU.flatten_parameters
    nn.GRU.flatten_parameters = lambda self: called.append("own")
    try:
        sgd = lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)  # noqa: E731
        engine = strategy.prepare(EngineSpec(model, sgd), world)
        called.clear()
        engine(torch.ones(2, 1, 3))
        during = [*called]
        engine.close()
        model.layer.flatten_parameters()
        return during, called
    finally:
        nn.GRU.flatten_parameters = own


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_recurrent_layers_leave_their_weights_where_they_are_gathered(
    strategy: str, world_pool: WorldPools
) -> None:
    make = lambda: resolve(strategy)  # noqa: E731
    for during, after in world_pool(2).run(on_strategy, make, moves_its_weights, ()):
        assert bool(during) is (strategy == "ddp")
        assert after[-1] == "own"
