"""Calls of Horovod's exchange what they exchange there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain_scripts import plainly
from torch import nn

from unipar.compat.horovod import torch as hvd
from unipar.errors import ConfigError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def exchanged() -> list[float]:
    hvd.init()
    own = hvd.rank() + 1.0
    found = [
        hvd.allreduce_(torch.tensor([own]), None, "in place", hvd.Sum),
        *hvd.grouped_allreduce_([torch.tensor([own])], None, "grouped", hvd.Sum),
        hvd.synchronize(hvd.allreduce_async(torch.tensor([own]), None, "handle", hvd.Max)),
        # Of numbers above 2048 half precision has the even ones alone.
        hvd.allreduce(torch.tensor([2049.0]), compression=hvd.Compression.fp16),
        hvd.allreduce(torch.tensor([2049.0]), compression=hvd.Compression.none),
    ]
    model = nn.Linear(2, 2)
    model.weight.data.fill_(own)
    # A list need have no names.
    hvd.broadcast_parameters(list(model.parameters()), 1)
    return [one.item() for one in (*found, model.weight[0, 0])]


def test_arguments_stand_where_they_stand_there(world_pool: Any) -> None:
    for found, _ in world_pool(2).run(plainly, "ddp", exchanged):
        assert found == [3.0, 3.0, 2.0, 2048.0, 2049.0, 2.0]


def test_a_compressor_of_the_scripts_own_is_refused() -> None:
    class InBF16:
        @staticmethod
        def compress(tensor: torch.Tensor) -> Any:
            return tensor.bfloat16(), tensor.dtype

    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    with pytest.raises(ConfigError, match=r"Use hvd.Compression.fp16 or none"):
        hvd.DistributedOptimizer(optimizer, compression=InBF16)
