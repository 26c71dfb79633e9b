"""Modes of modules, and names of parameters, as a loss function and a user see them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from unipar import Session
from unipar.data.batch import Batch, MicroBatch
from unipar.testing.pool import WorldPools
from unipar.world import Placement


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inward, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.inward(x)))


def batch() -> Batch:
    draw = torch.Generator().manual_seed(0)
    data = torch.randn(8, 4, generator=draw), torch.randint(0, 3, (8,), generator=draw)
    return Batch((MicroBatch(data, 8),), 8)


def loss(model: Any, data: Any) -> torch.Tensor:
    """Smooths labels in training alone, and keeps one layer's weights small, by its name."""
    inputs, targets = data
    smoothing = 0.5 if model.training else 0.0
    found = nn.functional.cross_entropy(model(inputs), targets, label_smoothing=smoothing)
    squares = [p.square().sum() for name, p in model.named_parameters() if name == "head.weight"]
    return found + 0.1 * torch.stack(squares).sum()


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.5)


def train(placement: Placement, strategy: str, mode: bool) -> list[float]:
    with Session(strategy, device="cpu", placement=placement) as session:
        net = Net().train(mode)
        engine = session.prepare(net, optimizer=sgd)
        return [engine.train_step(batch(), loss).loss for _ in range(3)]


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_loss_sees_the_users_modes_and_names(
    strategy: str, mode: bool, world_pool: WorldPools
) -> None:
    net = Net().train(mode)
    optimizer = sgd(net.named_parameters())
    plain = []
    for _ in range(3):
        optimizer.zero_grad()
        found = loss(net, batch().microbatches[0].data)
        found.backward()
        optimizer.step()
        plain.append(found.item())
    assert world_pool(1).run(train, strategy, mode) == [pytest.approx(plain, rel=1e-5)]


def names(placement: Placement) -> list[list[str]]:
    """What a loss function finds by name under ddp."""
    seen = []

    def looking(model: Any, data: Any) -> torch.Tensor:
        seen.append([name for name, _ in model.named_parameters()])
        seen.append([name for name, _ in model.named_buffers()])
        seen.append([name for name, _ in model.named_modules()])
        seen.append(list(model.state_dict()))
        model.load_state_dict(model.state_dict())
        return loss(model, data)

    with Session("ddp", device="cpu", placement=placement) as session:
        session.prepare(Net(), optimizer=sgd).train_step(batch(), looking)
    return seen


def test_whatever_has_a_name_has_the_users(world_pool: WorldPools) -> None:
    net = Net()
    named = net.named_parameters(), net.named_buffers(), net.named_modules()
    expected = [[name for name, _ in one] for one in named]
    assert world_pool(1).run(names) == [[*expected, list(net.state_dict())]]


class Attributed(Net):
    """Has names that DDP has, too, and one that a loss function changes."""

    def __init__(self) -> None:
        super().__init__()
        self.dim, self.logger, self.heat = 6, "own", 0.0
        self.heats: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.heats.append(self.heat)
        return super().forward(x)


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_attributes_are_read_from_the_users_module_and_set_on_it(
    strategy: str, world_pool: WorldPools
) -> None:
    def run(placement: Placement) -> list[Any]:
        seen: list[Any] = []

        def looking(model: Any, data: Any) -> torch.Tensor:
            seen.append((model.dim, model.logger))
            model.heat += 1.0
            return nn.functional.cross_entropy(model(data[0]), data[1])

        with Session(strategy, device="cpu", placement=placement) as session:
            net = Attributed()
            engine = session.prepare(net, optimizer=sgd)
            for _ in range(2):
                engine.train_step(batch(), looking)
            return [*seen, net.heats]

    assert world_pool(1).run(run) == [[(6, "own"), (6, "own"), [1.0, 2.0]]]


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_modes_that_are_set_after_an_evaluation_stay(strategy: str, world_pool: WorldPools) -> None:
    def run(placement: Placement) -> list[bool]:
        with Session(strategy, device="cpu", placement=placement) as session:
            engine = session.prepare(Net(), optimizer=sgd)
            net: Any = engine.module

            def mean(model: Any, data: Any) -> torch.Tensor:
                return nn.functional.cross_entropy(model(data[0]), data[1])

            engine.train_step(batch(), mean)
            net.head.eval()
            engine.eval_batch(batch(), mean)
            seen = [net.training, net.norm.training, net.head.training]
            net.norm.eval()
            engine.train_step(batch(), mean)
            return [*seen, net.training, net.norm.training, net.head.training]

    assert world_pool(1).run(run) == [[True, True, False, True, False, False]]


def test_a_block_that_has_a_forward_of_its_own_keeps_it() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    inputs = torch.ones(2, 4)
    for block in net:
        block.forward = lambda x, own=block.forward: 3 * own(x)
    before = net(inputs)
    with Session("single", device="cpu") as session:
        session.prepare(net, optimizer=sgd, activation_checkpointing=("Linear",))
    torch.testing.assert_close(net(inputs), before)
