"""A micro-batch that does not fit on one rank alone ends the run on all of them, with advice."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

import unipar
from unipar.errors import ConfigError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not hasattr(FSDPModule, "reset_iter_state"), reason="torch 2.13 or newer tries sizes"
    ),
]
LIMIT = 2


class Block(nn.Module):
    def __init__(self, narrow: bool) -> None:
        super().__init__()
        self.up, self.down, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8), narrow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.narrow and dist.get_rank() == 1 and len(x) > LIMIT:
            raise torch.OutOfMemoryError("no room")
        return x + self.down(self.up(x).tanh())


class Network(nn.Module):
    """In its second block, rank 1 has room for two samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(4, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(Block(number == 1) for number in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = block(x)
        return self.outward(x)


def fit(strategy: str) -> Any:
    torch.manual_seed(0)
    inputs = torch.randn(16, 4)
    return unipar.fit(
        Network(),
        (inputs, inputs.sum(1).gt(0).long()),
        strategy=strategy,
        devices=2,
        device="cpu",
        timeout=60,
        global_batch_size=8,
        micro_batch_size="auto",
        steps=1,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        optimizer={"name": "sgd", "lr": 0.1},
        checkpoint=False,
        progress=False,
    )


@pytest.mark.parametrize(("strategy", "tried"), [("fsdp", 4), ("mesh:tp=2", 8)])
def test_a_rank_that_others_wait_for_is_named_at_once(strategy: str, tried: int) -> None:
    began = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        fit(strategy)
    assert f"rank 1 ran out of memory trying {tried}, and others" in str(caught.value)
    assert f"Set micro_batch_size to a number that fits on rank 1 ({tried // 2}, say)" in str(
        caught.value
    )
    # No timeout was waited for.
    assert time.monotonic() - began < 45


def test_without_collectives_in_a_pass_all_ranks_take_what_fits_on_one() -> None:
    assert fit("ddp").metrics["train_loss"] > 0
