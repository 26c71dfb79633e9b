"""What a loss function is given has the modes, names and attributes of the user's module."""

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
        # DDP has a dim, too.
        self.config, self.dim, self.heat = {"width": 6}, 6, 0.0
        self.inward, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inward(x).relu())


NAMES = list(Net().state_dict())


def data() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(8, 4, generator=draw), torch.randint(0, 3, (8,), generator=draw)


def loss(model: Any, data: Any) -> torch.Tensor:
    """Smooths labels in training alone, and keeps one layer's weights small, by its name."""
    smoothing = 0.5 if model.training else 0.0
    found = nn.functional.cross_entropy(model(data[0]), data[1], label_smoothing=smoothing)
    squares = [p.square().sum() for name, p in model.named_parameters() if name == "head.weight"]
    return found + 0.1 * torch.stack(squares).sum()


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.5)


def train(placement: Placement, strategy: str, mode: bool) -> tuple[list[float], list[Any]]:
    """Losses of steps, and the names that the loss function saw."""
    inputs, targets = (one.chunk(placement.size)[placement.rank] for one in data())
    batch = Batch((MicroBatch((inputs, targets), len(inputs)),), 8)
    seen: list[Any] = []

    def looking(model: Any, data: Any) -> torch.Tensor:
        seen.append([name for name, _ in model.named_parameters()])
        seen.append(list(model.state_dict()))
        found = loss(model, data)
        assert (model.config, model.dim) == ({"width": 6}, 6)
        model.heat += 1.0
        return found

    with Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(Net().train(mode), optimizer=sgd)
        losses = [engine.train_step(batch, looking).loss for _ in range(3)]
        assert engine.module.heat == 3.0
        return losses, seen


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("strategy", ["accelerate", "accelerate:plugin=deepspeed,stage=2"])
def test_a_loss_sees_the_users_modes_names_and_attributes(
    strategy: str, mode: bool, world_pool: WorldPools
) -> None:
    net = Net().train(mode)
    optimizer = sgd(net.named_parameters())
    plain = []
    for _ in range(3):
        optimizer.zero_grad()
        found = loss(net, data())
        found.backward()
        optimizer.step()
        plain.append(found.item())
    for losses, seen in world_pool(2).run(train, strategy, mode):
        assert losses == pytest.approx(plain, rel=1e-5)
        assert all(one == NAMES for one in seen)
