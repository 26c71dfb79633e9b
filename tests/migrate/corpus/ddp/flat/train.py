"""Flat DDP script."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group(backend="gloo")
rank = dist.get_rank()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")

torch.manual_seed(0)
data = TensorDataset(torch.randn(100, 8), torch.randn(100, 1))  # tiny
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=8, sampler=sampler)

model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
model = DDP(model, device_ids=[local_rank] if torch.cuda.is_available() else None)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
criterion = nn.MSELoss()

for epoch in range(3):
    sampler.set_epoch(epoch)  # a new order
    model.train()
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    scheduler.step()
    if rank == 0:
        print(f"epoch {epoch}: {loss.item():.6f}")
        torch.save(model.module.state_dict(), "model.pt")
    dist.barrier()

dist.destroy_process_group()
