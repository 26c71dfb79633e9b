"""PyTorch's own distributed checkpoint reads what unipar has written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from unipar import Session
from unipar.testing.models import Tied
from unipar.testing.pool import WorldPools
from unipar.world import Placement


class Odd(nn.Module):
    """Tied weights, a scalar, and first dimensions that two ranks cannot share equally."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = Tied()
        self.single_row = nn.Linear(5, 1)
        self.register_buffer("count", torch.tensor(7))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tied(tokens)


def save(placement: Placement, strategy: str, directory: Path) -> Path:
    with Session(strategy, device="cpu", placement=placement) as session:
        session.prepare(Odd, optimizer=lambda named: torch.optim.AdamW([p for _, p in named]))
        return session.save(directory, step=3)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_reads_what_two_ranks_have_written(
    strategy: str, world_pool: WorldPools, tmp_path: Path
) -> None:
    path = world_pool(2).run(save, strategy, tmp_path)[0]
    weights = path / "model" / "weights"
    assert len(list(weights.glob("*.safetensors"))) == (2 if strategy == "fsdp" else 1)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected = Odd().state_dict()
    # A tied weight is stored under one of its names.
    del expected["tied.head.weight"]
    state = {name: torch.full_like(tensor, 99) for name, tensor in expected.items()}
    load(state, storage_reader=HuggingFaceStorageReader(str(weights)), no_dist=True)
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name
