"""A loop of Horovod's."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def train(job: Any) -> None:
    hvd.init()
    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    sampler = DistributedSampler(job.data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(job.data, batch_size=job.batch_size, sampler=sampler)
    for inputs, targets in job.turns(loader):
        optimizer.zero_grad()
        loss = job.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
