"""Ranks that hold parts of one replica train on the same samples, which count once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import MeanMetric

from unipar.data import Loader
from unipar.engine import Reducer, StepEngine
from unipar.errors import ConfigError
from unipar.evaluation.evaluate import evaluate
from unipar.layout import Layout
from unipar.loss import LossSum
from unipar.session import Session
from unipar.strategy import EngineSpec
from unipar.testing.pool import WorldPools
from unipar.world import Flag, Placement, join, joined

pytestmark = pytest.mark.slow

X = torch.arange(60.0).reshape(20, 3) / 30
WEIGHTED = (X.sum(1, keepdim=True) > 2).float() + 0.5


LAYOUT = Layout(dp_replicate=2, pp=2)


class Summing(Reducer):
    """Both ranks of a replica have its whole gradient here, so the sum is over replicas."""

    def finish(self) -> None:
        group = self.world.mesh("batch").get_group()
        for parameter in self.module.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=group)


def make_model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.1)


def terms(model: Any, batch: Any) -> LossSum:
    x, weight = batch
    return LossSum((weight * model(x).square()).sum(), weight.sum())


def mean(model: Any, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


def train(placement: Placement, loss: Any) -> list[tuple[float, float]]:
    with joined(placement, LAYOUT) as world:
        model = make_model()
        spec, optimizer = EngineSpec(model, optimizer=sgd), sgd(model.named_parameters())
        engine = StepEngine(spec, world, model, optimizer, reducer=Summing(model, world))
        loader = Loader(
            (X, WEIGHTED),
            global_batch_size=8,
            micro_batch_size=3,
            data_rank=world.data_rank,
            data_size=world.data_size,
            shuffle=False,
        )
        steps = [engine.train_step(batch, loss) for batch in loader]
        return [(step.loss, step.num_items) for step in steps]


@pytest.mark.parametrize("loss", [terms, mean])
def test_steps_are_those_of_a_plain_loop(loss: Any, world_pool: WorldPools) -> None:
    model = make_model()
    optimizer = sgd(model.named_parameters())
    expected: list[tuple[float, float]] = []
    for start in range(0, 20, 8):
        x = X[start : start + 8]
        weight = WEIGHTED[start : start + 8] if loss is terms else torch.ones(len(x), 1)
        value = (weight * model(x).square()).sum() / weight.sum()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        expected.append((value.item(), weight.sum().item()))
    for of_rank in world_pool(4).run(train, loss):
        assert of_rank == [pytest.approx(step, rel=1e-5) for step in expected]


def measure(placement: Placement) -> dict[str, float]:
    def predict(model: Any, batch: Any) -> Any:
        # What a rank sees that does not lead is none of the replica's business.
        return model(batch[0]) if world.leads else torch.full((len(batch[0]), 1), 1e6), batch[1]

    def weighted(predictions: torch.Tensor, weight: torch.Tensor) -> LossSum:
        return LossSum((weight * predictions).sum(), weight.sum())

    with joined(placement, LAYOUT) as world:
        engine = StepEngine(EngineSpec(make_model()), world, make_model())
        loader = Loader(
            (X, WEIGHTED),
            global_batch_size=8,
            data_rank=world.data_rank,
            data_size=world.data_size,
            shuffle=False,
        )
        metrics = {"weighted": weighted, "torchmetrics": MeanMetric()}
        return evaluate(engine, loader, terms, world, metrics=metrics, predict=predict)


def test_an_evaluation_counts_each_replica_once(world_pool: WorldPools) -> None:
    with torch.no_grad():
        out = make_model()(X)
    total = WEIGHTED.sum()
    weighted = ((WEIGHTED * out).sum() / total).item()
    expected = {
        "loss": ((WEIGHTED * out.square()).sum() / total).item(),
        "weighted": weighted,
        "torchmetrics": weighted,
    }
    for of_rank in world_pool(4).run(measure):
        assert of_rank == pytest.approx(expected, rel=1e-5)


def ask(placement: Placement) -> bool:
    with joined(placement, LAYOUT) as world:
        if placement.rank == 2:
            world.raise_flag(Flag.INTERRUPT)
        world.start_reduce_loss(torch.tensor(1.0), 1).wait()
        return world.take_flag(Flag.INTERRUPT)


def test_a_rank_that_does_not_lead_is_heard(world_pool: WorldPools) -> None:
    assert world_pool(4).run(ask) == [True] * 4


def draw(placement: Placement, layout: Layout) -> float:
    session = Session("ddp", device="cpu", placement=placement)
    session.strategy.layout = lambda placement: layout
    with session:
        session.prepare(make_model())
        return torch.rand(()).item()


def test_ranks_that_compute_the_same_layers_of_a_replica_draw_alike(
    world_pool: WorldPools,
) -> None:
    # Ranks 0 and 1 hold the first replica.
    first, second, third, fourth = world_pool(4).run(draw, Layout(dp_replicate=2, tp=2))
    assert first == second != third == fourth
    # Stages have other layers, whose masks must not be the same.
    assert len(set(world_pool(4).run(draw, LAYOUT))) == 4


def disagree(placement: Placement) -> str:
    session = Session("ddp", device="cpu", placement=placement)
    session.strategy.setup = join
    session.strategy.layout = lambda placement: LAYOUT
    with pytest.raises(ConfigError) as refused, session:
        pass
    return str(refused.value)


def test_a_world_that_is_not_arranged_as_was_said_is_refused(world_pool: WorldPools) -> None:
    for said in world_pool(4).run(disagree):
        assert "strategy 'ddp'" in said
        assert "join(placement, self.layout(placement))" in said
