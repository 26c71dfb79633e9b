"""Automatic accumulation, by a plugin, with clipping, and a stream that rank 0 reads for all."""

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin, set_seed
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Waves(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        for _ in range(43):
            x = torch.rand(2, generator=generator)
            yield x, torch.sin(3 * x)


plugin = GradientAccumulationPlugin(num_steps=3, adjust_scheduler=False)
accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
set_seed(9)
model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
model = accelerator.prepare(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
loader = DataLoader(Waves(), batch_size=3)
optimizer = accelerator.prepare(optimizer)
loader, scheduler = accelerator.prepare(loader, scheduler)
norms, steps = [], 0
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            steps += 1
            norms.append(float(norm))
accelerator.print(f"{steps} steps, the largest gradient {max(norms):.3f}")
