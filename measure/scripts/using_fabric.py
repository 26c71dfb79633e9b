"""A loop of Lightning Fabric's."""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader


def train(job: Any) -> None:
    fabric = Fabric(accelerator="cpu", devices=job.ranks)
    fabric.launch()
    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(job.data, batch_size=job.batch_size, shuffle=True))
    for inputs, targets in job.turns(loader):
        optimizer.zero_grad()
        loss = job.loss(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
