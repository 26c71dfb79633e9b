"""Polynomial regression with ZeRO; keeps checkpoints, and starts from one if told to."""

import argparse
import os

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR
from torch.utils.data import Dataset

import colossalai
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import LowLevelZeroPlugin
from colossalai.cluster import DistCoordinator
from colossalai.logging import get_dist_logger


class Polynomials(Dataset):
    """x -> (p(x_1), p(x_2), ...) for a fixed p"""

    def __init__(self, size: int):
        self.x = torch.linspace(-2, 2, size * 4).view(4, size).t().contiguous()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x = self.x[index]
        return x, 0.3 * x**3 - x + 0.5


def build_model(width):
    return nn.Sequential(nn.Linear(4, width), nn.SiLU(), nn.LayerNorm(width), nn.Linear(width, 4))


def train_epoch(epoch, model, optimizer, criterion, scheduler, loader, booster, coordinator):
    device = get_accelerator().get_current_device()
    model.train()
    loader.sampler.set_epoch(epoch)
    for step, (x, y) in enumerate(loader):
        loss = criterion(model(x.to(device)), y.to(device))
        booster.backward(loss, optimizer)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            coordinator.print_on_master(f"{epoch}/{step} {loss.item():.4f}")


def save(booster, model, optimizer, scheduler, path, coordinator):
    if coordinator.is_master():
        os.makedirs(path, exist_ok=True)
    coordinator.block_all()
    booster.save_model(model, os.path.join(path, "model.pt"), shard=False)
    booster.save_optimizer(optimizer, os.path.join(path, "optimizer.pt"), shard=False)
    booster.save_lr_scheduler(scheduler, os.path.join(path, "scheduler.pt"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-e", "--epochs", type=int, default=3)
    parser.add_argument("-b", "--batch-size", type=int, default=6)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--checkpoints", default="ckpt")
    args = parser.parse_args()

    colossalai.launch_from_torch(seed=5)
    coordinator = DistCoordinator()
    logger = get_dist_logger()
    logger.info(f"{coordinator.world_size} processes", ranks=[0])

    plugin = LowLevelZeroPlugin(stage=1, precision="fp32", max_norm=0.5, overlap_communication=False)
    booster = Booster(plugin=plugin)

    loader = plugin.prepare_dataloader(Polynomials(70), batch_size=args.batch_size, shuffle=True)
    model = build_model(24)
    criterion = nn.MSELoss()
    optimizer = AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    scheduler = LinearLR(optimizer, start_factor=0.2, total_iters=10)
    model, optimizer, criterion, loader, scheduler = booster.boost(
        model, optimizer, criterion, loader, scheduler
    )
    start = 0
    if args.resume:
        booster.load_model(model, os.path.join(args.checkpoints, "model.pt"))
        booster.load_optimizer(optimizer, os.path.join(args.checkpoints, "optimizer.pt"))
        booster.load_lr_scheduler(scheduler, os.path.join(args.checkpoints, "scheduler.pt"))
        start = 1
    for epoch in range(start, args.epochs):
        train_epoch(epoch, model, optimizer, criterion, scheduler, loader, booster, coordinator)
        if epoch == 0:
            save(booster, model, optimizer, scheduler, args.checkpoints, coordinator)


if __name__ == "__main__":
    main()
