"""Weights and optimizer in directories of shards; a second model goes on from there."""

import os

import colossalai
import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.cluster import DistCoordinator
from colossalai.nn.lr_scheduler import PolynomialWarmupLR
from torch import nn
from torch.utils.data import TensorDataset


def build(booster):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 300), nn.GELU(), nn.Linear(300, 300), nn.GELU(), nn.Linear(300, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.8, 0.95), weight_decay=0.02)
    scheduler = PolynomialWarmupLR(optimizer, total_steps=30, warmup_steps=4, end_lr=1e-5)
    model, optimizer, _, _, scheduler = booster.boost(model, optimizer, lr_scheduler=scheduler)
    return model, optimizer, scheduler


def train(booster, model, optimizer, scheduler, dataloader, epoch):
    dataloader.sampler.set_epoch(epoch)
    for x, y in dataloader:
        loss = nn.functional.cross_entropy(model(x), y)
        booster.backward(loss, optimizer)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def main():
    colossalai.launch_from_torch(seed=11)
    coordinator = DistCoordinator()
    plugin = LowLevelZeroPlugin(stage=2, precision="fp32", overlap_communication=False)
    booster = Booster(plugin=plugin)
    x = torch.randn(72, 6)
    dataloader = plugin.prepare_dataloader(TensorDataset(x, (x[:, 0] > x[:, 1]).long()), batch_size=6, shuffle=True)

    first = build(booster)
    train(booster, *first, dataloader, 0)
    path = "checkpoints/epoch-0"
    if coordinator.is_master():
        os.makedirs(path, exist_ok=True)
    coordinator.block_all()
    booster.save_model(first[0], os.path.join(path, "modeling"), shard=True, size_per_shard=1, use_safetensors=True)
    booster.save_optimizer(first[1], os.path.join(path, "optimizer"), shard=True, size_per_shard=1)
    booster.save_lr_scheduler(first[2], os.path.join(path, "lr_scheduler"))
    coordinator.block_all()

    second = build(booster)
    booster.load_model(second[0], os.path.join(path, "modeling"))
    booster.load_optimizer(second[1], os.path.join(path, "optimizer"))
    booster.load_lr_scheduler(second[2], os.path.join(path, "lr_scheduler"))
    train(booster, *second, dataloader, 1)
    train(booster, *second, dataloader, 2)


if __name__ == "__main__":
    main()
