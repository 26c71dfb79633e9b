"""The same as start_fit.py, by hand and under ``torchrun``."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 32), torch.randint(0, 10, (256,)))
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        logged = loss.detach()
        dist.all_reduce(logged)
        logged.item()
        break
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(f"{time.time()}\n")
    # Now and then a gloo thread of torch 2.13 that still works aborts the process at its exit.
    time.sleep(0.2)
    dist.destroy_process_group()


main()
