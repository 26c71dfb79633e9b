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
        # DeepSpeed's engine has a config, too.
        self.config, self.heat = {"width": 6}, 0.0
        self.inward, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inward(x).relu())


NAMES = list(Net().state_dict())


def data() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(8, 4, generator=draw), torch.randint(0, 3, (8,), generator=draw)


def loss(model: Any, data: Any) -> torch.Tensor:
    """Smooths labels in training alone."""
    smoothing = 0.5 if model.training else 0.0
    return nn.functional.cross_entropy(model(data[0]), data[1], label_smoothing=smoothing)


def with_penalty(model: Any, data: Any) -> torch.Tensor:
    """Also keeps one layer's weights small, by its name."""
    squares = [p.square().sum() for name, p in model.named_parameters() if name == "head.weight"]
    return loss(model, data) + 0.1 * torch.stack(squares).sum()


def sgd(named: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named], lr=0.5)


def train(placement: Placement, strategy: str, mode: bool) -> tuple[list[float], list[Any]]:
    """Losses of steps, and the names that the loss function saw."""
    inputs, targets = (one.chunk(placement.size)[placement.rank] for one in data())
    batch = Batch((MicroBatch((inputs, targets), len(inputs)),), 8)
    seen: list[Any] = []
    # Stage 3 has no whole weights outside of the model's own pass.
    wanted = loss if strategy == "zero3" else with_penalty

    def looking(model: Any, data: Any) -> torch.Tensor:
        seen.append([name for name, _ in model.named_parameters()])
        seen.append(list(model.state_dict()))
        found = wanted(model, data)
        assert model.config == {"width": 6}
        model.heat += 1.0
        return found

    with Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(Net().train(mode), optimizer=sgd)
        losses = [engine.train_step(batch, looking).loss for _ in range(3)]
        assert engine.module.heat == 3.0
        return losses, seen


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("strategy", ["deepspeed:stage=0", "zero1", "zero2", "zero3"])
def test_a_loss_sees_the_users_modes_names_and_attributes(
    strategy: str, mode: bool, world_pool: WorldPools
) -> None:
    net = Net().train(mode)
    optimizer = sgd(net.named_parameters())
    plain = []
    for _ in range(3):
        optimizer.zero_grad()
        found = (loss if strategy == "zero3" else with_penalty)(net, data())
        found.backward()
        optimizer.step()
        plain.append(found.item())
    for losses, seen in world_pool(2).run(train, strategy, mode):
        assert losses == pytest.approx(plain, rel=1e-5)
        assert all(one == NAMES for one in seen)
