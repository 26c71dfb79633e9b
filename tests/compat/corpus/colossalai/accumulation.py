"""Gradients of four micro-batches under ZeRO-1, reduced once."""

from contextlib import nullcontext

import colossalai
import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from torch import nn
from torch.utils.data import TensorDataset

GRADIENT_ACCUMULATION = 4

colossalai.launch_from_torch()
plugin = LowLevelZeroPlugin(1, "fp32", overlap_communication=False, max_norm=1.0)
booster = Booster(plugin=plugin)

x = torch.rand(96, 5) * 2 - 1
dataset = TensorDataset(x, (x.prod(1, keepdim=True) * 20))
dataloader = plugin.prepare_dataloader(dataset, batch_size=4, shuffle=True)
model = nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = CosineAnnealingWarmupLR(optimizer, total_steps=9, warmup_steps=2, eta_min=1e-3)
criterion = nn.SmoothL1Loss()
model, optimizer, criterion, dataloader, scheduler = booster.boost(model, optimizer, criterion, dataloader, scheduler)

for epoch in range(3):
    dataloader.sampler.set_epoch(epoch)
    for index, (inputs, targets) in enumerate(dataloader):
        synced = (index + 1) % GRADIENT_ACCUMULATION == 0
        with nullcontext() if synced else booster.no_sync(model, optimizer):
            loss = criterion(model(inputs), targets) / GRADIENT_ACCUMULATION
            booster.backward(loss, optimizer)
        if synced:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
