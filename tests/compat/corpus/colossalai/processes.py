"""A script that starts its own processes, and tells each its rank."""

import os
import socket

import torch
import torch.multiprocessing as mp
from colossalai import launch
from colossalai.booster import Booster
from colossalai.booster.plugin import TorchDDPPlugin
from torch import nn


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def run(rank, world_size, port):
    launch(rank=rank, world_size=world_size, host="127.0.0.1", port=port, backend="nccl", seed=1, verbose=False)
    booster = Booster(plugin=TorchDDPPlugin())
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, *_ = booster.boost(model, optimizer)
    x = torch.randn(64, 3)[rank::world_size]
    for batch in x.split(4):
        loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    with open(f"rank-{rank}.txt", "w") as file:
        file.write(f"{loss.item()} {model.unwrap().weight.sum().item()}")


if __name__ == "__main__":
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    mp.spawn(run, args=(2, free_port()), nprocs=2)
