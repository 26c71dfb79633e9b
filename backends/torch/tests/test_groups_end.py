"""What a session has made, its process groups and their threads, ends with it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import unipar
from unipar.testing.pool import WorldPools
from unipar.world import Placement


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def meshes() -> int:
    from torch.distributed.device_mesh import DeviceMesh

    gc.collect()
    return sum(type(one) is DeviceMesh for one in gc.get_objects())


def train(placement: Placement, strategy: str) -> int:
    """How many meshes there are while a model trains."""
    with unipar.Session(strategy=strategy, placement=placement) as session:
        blocks = nn.Sequential(Block(), Block())
        engine = session.prepare(blocks, optimizer="adamw", max_grad_norm=1.0)
        for batch in session.loader(torch.randn(16, 6), global_batch_size=8):
            step = engine.train_step(batch, lambda model, x: model(x).square().mean())
            assert step.grad_norm
        return meshes()


def made_and_left(placement: Placement, strategy: str) -> tuple[int, int]:
    """How many meshes more there are in a session, and when it has ended."""
    before = meshes()
    return train(placement, strategy) - before, meshes() - before


@pytest.mark.parametrize("strategy", ["fsdp", "mesh:tp=2"])
def test_no_group_outlives_its_session(strategy: str, world_pool: WorldPools) -> None:
    # A group has threads, and those of gloo wake a hundred times a second.
    for made, left in world_pool(2).run(made_and_left, strategy):
        assert made > 0
        assert left == 0
