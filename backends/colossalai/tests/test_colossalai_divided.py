"""What the plugins that divide weights, FSDP and Gemini, have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from colossalai_engines import (
    FSDP,
    GEMINI,
    adamw,
    network,
    precision_of,
    square,
    train,
    with_engine,
)
from torch import nn, optim

from unipar import Session
from unipar.errors import ConfigError
from unipar.testing.compare import assemble_weights, assert_equal_weights
from unipar.testing.pool import WorldPools
from unipar.world import Placement

both = pytest.mark.parametrize("strategy", [FSDP, GEMINI])


@both
def test_rank_0s_weights_are_everyones(strategy: str, world_pool: WorldPools) -> None:
    def run(placement: Placement) -> Any:
        return with_engine(placement, strategy, train, network(3 + placement.rank))

    apart = world_pool(2).run(run)
    alike = world_pool(2).run(with_engine, strategy, train, network())
    assert_equal_weights(assemble_weights(apart), assemble_weights(alike), 0.0)


class Spare(nn.Module):
    """The loss does not depend on one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


@pytest.mark.parametrize(
    "strategy", [FSDP, FSDP + ",wrap=[Linear]", GEMINI, GEMINI + ",chunk_size_m=0"]
)
def test_a_weight_without_gradient_is_named(strategy: str, world_pool: WorldPools) -> None:
    for said in world_pool(2).run(with_engine, strategy, train, Spare()):
        assert "does not depend on 2 of the parameters to train: spare.weight, spare.bias" in said


@both
def test_weights_that_are_not_there_are_not_read(strategy: str, world_pool: WorldPools) -> None:
    def penalized(model: Any, x: Any) -> torch.Tensor:
        return square(model, x) + sum(p.square().sum() for p in model.parameters())

    def run(engine: Any, world: Any) -> Any:
        return train(engine, world, penalized)

    said = world_pool(1).run(with_engine, strategy, run, network())[0]
    assert "which are divided among ranks" in said

    def around(engine: Any, world: Any) -> Any:
        return engine.module(torch.ones(2, 4))

    said = world_pool(1).run(with_engine, strategy, around, network())[0]
    assert "engine.module was called" in said


@both
def test_an_optimizer_that_needs_whole_tensors_is_refused(
    strategy: str, world_pool: WorldPools
) -> None:
    def run(placement: Placement) -> Any:
        def adafactor(named: Any) -> optim.Optimizer:
            return optim.Adafactor([p for _, p in named])

        return with_engine(placement, strategy, train, network(), optimizer=adafactor)

    assert "cannot be used where ranks divide what it updates" in world_pool(1).run(run)[0]


@both
def test_a_second_model_is_refused(strategy: str, world_pool: WorldPools) -> None:
    def run(placement: Placement) -> str:
        precision = precision_of(strategy)
        with Session(strategy, precision=precision, device="cpu", placement=placement) as session:
            session.prepare(network(), optimizer=adamw)
            try:
                session.prepare(network(), optimizer=adamw, name="other")
            except ConfigError as error:
                return str(error)
        return "it was taken"

    assert "taken" not in world_pool(1).run(run)[0]
