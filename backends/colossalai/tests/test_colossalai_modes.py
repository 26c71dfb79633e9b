"""What a loss function is given is in the mode of the user's module, and has its names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from unipar import Session
from unipar.data.batch import Batch, MicroBatch
from unipar.testing.pool import WorldPools
from unipar.world import Placement

pytestmark = pytest.mark.slow


def seen(placement: Placement, strategy: str) -> list[tuple[bool, list[str]]]:
    """The mode and the names that a loss function sees: in a step, in an evaluation, in a step."""
    found = []

    def loss(model: Any, data: Any) -> torch.Tensor:
        # What is divided is refused.
        named = () if strategy.endswith("fsdp") else model.named_parameters()
        found.append((model.training, [name for name, _ in named]))
        return nn.functional.mse_loss(model(data), data)

    batch = Batch((MicroBatch(torch.ones(4, 4), 4),), 4)
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    with Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(
            net, optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.1)
        )
        engine.train_step(batch, loss)
        engine.eval_batch(batch, loss)
        engine.train_step(batch, loss)
    return found


@pytest.mark.parametrize("plugin", ["ddp", "zero2", "fsdp"])
def test_modes_and_names_are_those_of_the_users_module(plugin: str, world_pool: WorldPools) -> None:
    for found in world_pool(1).run(seen, f"colossalai:plugin={plugin}"):
        assert [mode for mode, _ in found] == [True, False, True]
        names = [] if plugin == "fsdp" else ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert all(one == names for _, one in found)
