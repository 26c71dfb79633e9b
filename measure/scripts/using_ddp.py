"""A loop of DistributedDataParallel's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler


def train(job: Any) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(job.model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(job.data)
    loader = DataLoader(job.data, batch_size=job.batch_size, sampler=sampler)
    for inputs, targets in job.turns(loader):
        optimizer.zero_grad()
        loss = job.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
