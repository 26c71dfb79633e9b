"""Samples that workers change at random: each worker of each rank by numbers of its own."""

import random

import lightning_fabric as lf
import numpy as np
import torch
from lightning_fabric.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Shaken(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.full((2,), index / 64)
        x = x + 0.1 * torch.randn(2) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        return x, x.prod(0, keepdim=True)


fabric = lf.Fabric(accelerator="cpu", devices=2, plugins=LightningEnvironment())
fabric.launch()
fabric.seed_everything(2)
loader = fabric.setup_dataloaders(DataLoader(Shaken(), batch_size=4, num_workers=2))
model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.2))
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        fabric.backward(loss)
        optimizer.step()
    fabric.print(f"epoch {epoch}: {loss.item():.5f}")
