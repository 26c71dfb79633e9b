"""A loop of Accelerate's."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader


def train(job: Any) -> None:
    accelerator = Accelerator(cpu=True)
    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(job.data, batch_size=job.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for inputs, targets in job.turns(loader):
        optimizer.zero_grad()
        loss = job.loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
