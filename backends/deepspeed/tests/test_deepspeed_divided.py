"""Stage 3 of ZeRO has weights only while the model computes: a loss made of them is refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unipar import Session, load_model
from unipar.data.batch import Batch, MicroBatch
from unipar.errors import ConfigError
from unipar.testing.pool import WorldPools
from unipar.world import Placement

STEPS = 3


class Layer(nn.Module):
    """It gives a penalty of its own weights, too."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) / width)
        self.bias = nn.Parameter(torch.randn(out))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = nn.functional.linear(x, self.weight, self.bias)
        return out, self.weight.square().sum() + self.bias.square().sum()


class Net(nn.Module):
    def __init__(self, penalize_all: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = Layer(6, 5), Layer(5, 1)
        self.penalize_all = penalize_all

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, first = self.first(x)
        x, last = self.last(x.tanh())
        if self.penalize_all:
            return x, torch.stack([p.square().sum() for p in self.parameters()]).sum()
        return x, first + last


def of_output(model: Any, x: torch.Tensor) -> torch.Tensor:
    out, penalty = model(x)
    # What parameters are may be asked, as a script does that counts them, or moves data to them.
    x = x.to(next(model.parameters()).device)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return out.square().mean() + penalty / count


def of_parameters(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x)[0].square().mean() + sum(p.square().sum() for p in model.parameters())


def of_named(model: Any, x: torch.Tensor) -> torch.Tensor:
    found = [p.norm() for name, p in model.named_parameters() if name.endswith("weight")]
    return torch.stack(found).sum() + model(x)[0].square().mean()


def of_values(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        size = sum(p.detach().square().sum() for p in model.parameters())
    return model(x)[0].square().mean() * (1 + size)


def of_one_layer(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x)[0].square().mean() + model.first.weight.square().sum()


def data(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], 0.05)


def by_hand(
    after: Callable[[nn.Module], None] = lambda model: None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The plain loop, with what is done after each step; nothing of unipar in it."""
    model, losses = Net(), []
    optimizer = sgd(model.named_parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = torch.stack([of_output(model, data(step, rank)) for rank in range(2)]).mean()
        loss.backward()
        optimizer.step()
        after(model)
        losses.append(loss.item())
    return losses, model.state_dict()


def train(placement: Placement) -> list[float]:
    with Session("zero3", placement=placement) as session:
        engine = session.prepare(Net(), optimizer=sgd)
        batches = [Batch((MicroBatch(data(step, placement.rank), 4),), 8) for step in range(STEPS)]
        return [float(engine.train_step(batch, of_output).loss) for batch in batches]


def test_a_penalty_that_layers_give_is_the_plain_loops(world_pool: WorldPools) -> None:
    for losses in world_pool(2).run(train):
        assert losses == pytest.approx(by_hand()[0], rel=1e-5)


class Adapted(nn.Module):
    """A layer with parameters of its own beside it, as low-rank adapters have them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(6))
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.scale * checkpoint(self.inner, x, use_reentrant=False)


def train_adapted(placement: Placement, strategy: Any) -> list[float]:
    with Session(strategy, placement=placement) as session:
        engine, losses = session.prepare(Adapted(), optimizer=sgd), []
        for step in range(STEPS):
            with torch.no_grad():
                engine(data(step, placement.rank))
            batch = Batch((MicroBatch(data(step, placement.rank), 4),), 8)
            result = engine.train_step(batch, lambda model, x: model(x).square().mean())
            losses.append(float(result.loss))
        return losses


@pytest.mark.parametrize("strategy", ["zero3", "zero3:persistence_threshold=0"])
def test_a_module_has_parameters_beside_those_of_modules_in_it(
    world_pool: WorldPools, strategy: str
) -> None:
    expected = world_pool(2).run(train_adapted, "ddp")
    for losses, whole in zip(world_pool(2).run(train_adapted, strategy), expected, strict=True):
        assert losses == pytest.approx(whole, rel=1e-5)


def refusal_of(placement: Placement, loss: Callable[..., Any], penalize_all: bool) -> str:
    with Session("zero3", placement=placement) as session:
        engine = session.prepare(Net(penalize_all), optimizer=sgd)
        with pytest.raises(ConfigError) as refused:
            engine.train_step(Batch((MicroBatch(data(0, placement.rank), 4),), 8), loss)
        return str(refused.value)


@pytest.mark.parametrize(
    ("loss", "penalize_all", "said"),
    [
        (of_parameters, False, "the loss function uses 'first.weight' of the model"),
        (of_named, False, "the loss function uses 'first.weight' of the model"),
        (of_values, False, "the loss function uses 'first.weight' of the model"),
        (of_one_layer, False, "'first.weight' of the model was used where stage 3 of ZeRO has not"),
        (of_output, True, "in the forward of another module than the one that holds it"),
    ],
)
def test_a_loss_made_of_weights_is_refused_by_name(
    world_pool: WorldPools, loss: Callable[..., Any], penalize_all: bool, said: str
) -> None:
    for message in world_pool(2).run(refusal_of, loss, penalize_all):
        assert said in message
        assert "weight_decay" in message
        assert "'ddp'" in message


def own_loop(placement: Placement) -> str:
    with Session("zero3", placement=placement) as session:
        model = Net()
        engine = session.prepare(model, optimizer=sgd)
        # DeepSpeed keeps small parameters whole from the first step on.
        engine.train_step(Batch((MicroBatch(data(0, placement.rank), 4),), 8), of_output)
        penalty = torch.stack([p.square().sum() for p in model.parameters()]).sum()
        loss = engine(data(0, placement.rank))[0].square().mean() + penalty
        with pytest.raises(ConfigError) as refused:
            engine.backward(loss, num_items=4)
        return str(refused.value)


def test_so_is_one_in_a_loop_of_ones_own(world_pool: WorldPools) -> None:
    for message in world_pool(2).run(own_loop):
        assert "by another way than the model's output" in message


def clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.05, 0.05)


def train_clamped(placement: Placement, directory: str) -> list[float]:
    with Session("zero3", placement=placement) as session:
        model, losses = Net(), []
        engine = session.prepare(model, optimizer=sgd)
        for step in range(STEPS):
            batch = Batch((MicroBatch(data(step, placement.rank), 4),), 8)
            losses.append(float(engine.train_step(batch, of_output).loss))
            clamp(model)
        session.save(directory)
        return losses


def test_what_stays_whole_may_be_changed_by_hand(world_pool: WorldPools, tmp_path: Path) -> None:
    expected, weights = by_hand(clamp)
    for losses in world_pool(2).run(train_clamped, str(tmp_path)):
        assert losses == pytest.approx(expected, rel=1e-5)
    model = Net()
    load_model(tmp_path, model)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, weights[name])


def norm(model: nn.Module) -> None:
    with torch.no_grad():
        next(model.parameters()).norm()


def save(model: nn.Module) -> None:
    torch.save(model.state_dict(), io.BytesIO())


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        torch.zeros(parameter.shape).lerp_(parameter.detach(), 0.1)


def fill(model: nn.Module) -> None:
    for parameter, value in zip(model.parameters(), Net().parameters(), strict=True):
        parameter.data.copy_(value)


def assign(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = torch.zeros(parameter.shape)


DIVIDED = {"name": "zero3", "persistence_threshold": 0}


def refusals(placement: Placement, uses: list[Callable[[nn.Module], None]]) -> list[str]:
    with Session(DIVIDED, placement=placement) as session:
        model, said = Net(), []
        engine = session.prepare(model, optimizer=sgd)
        batch = Batch((MicroBatch(data(0, placement.rank), 4),), 8)
        for use in uses:
            engine.train_step(batch, of_output)
            try:
                use(model)
                # What was put there is found when DeepSpeed would gather over it.
                engine.train_step(batch, of_output)
            except ConfigError as error:
                said.append(str(error))
        # They are what they are, whatever is there at the moment.
        assert [p.shape for p in model.parameters()] == [p.shape for p in Net().parameters()]
        assert "Parameter" in repr(next(model.parameters()))
        return said


def test_what_is_divided_is_not_taken_for_what_is_there(world_pool: WorldPools) -> None:
    uses = [norm, clamp, save, average, fill, assign]
    for said in world_pool(2).run(refusals, uses):
        for use, message in zip(uses, said, strict=True):
            assert "'first.weight' of the model was used where stage 3" in message, use
            assert "unipar.load_model" in message
