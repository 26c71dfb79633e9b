"""A small residual network on made-up pictures; the plugin is chosen on the command line."""

import argparse
import os
from pathlib import Path

import colossalai
import torch
import torch.distributed as dist
import torch.nn as nn
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import GeminiPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from colossalai.booster.plugin.dp_plugin_base import DPPluginBase
from colossalai.cluster import DistCoordinator
from colossalai.nn.lr_scheduler import MultiStepLR
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils import get_current_device
from torch.utils.data import TensorDataset

NUM_EPOCHS = 3
LEARNING_RATE = 1e-3


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


def build_model(classes):
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), Block(8), nn.AvgPool2d(2), Block(8),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes),
    )


def build_dataloader(batch_size: int, coordinator: DistCoordinator, plugin: DPPluginBase):
    with coordinator.priority_execution():
        labels = torch.arange(60) % 4
        images = torch.randn(60, 1, 8, 8) * 0.3 + labels.view(-1, 1, 1, 1) / 2
    train = plugin.prepare_dataloader(TensorDataset(images[:44], labels[:44]), batch_size, shuffle=True, drop_last=True)
    test = plugin.prepare_dataloader(TensorDataset(images[44:], labels[44:]), batch_size)
    return train, test


@torch.no_grad()
def evaluate(model, test_dataloader, coordinator):
    model.eval()
    correct = torch.zeros(1, dtype=torch.int64, device=get_accelerator().get_current_device())
    total = torch.zeros(1, dtype=torch.int64, device=get_current_device())
    for images, labels in test_dataloader:
        images, labels = images.to(get_current_device()), labels.to(get_current_device())
        predicted = model(images).argmax(dim=1)
        total += labels.size(0)
        correct += (predicted == labels).sum()
    dist.all_reduce(correct)
    dist.all_reduce(total)
    accuracy = correct.item() / total.item()
    if coordinator.is_master():
        print(f"Accuracy of the model on the test images: {accuracy * 100:.2f} %")
    return accuracy


def train_epoch(epoch, model, optimizer, criterion, dataloader, booster, coordinator):
    model.train()
    dataloader.sampler.set_epoch(epoch)
    for images, labels in dataloader:
        outputs = model(images.to(get_current_device()))
        loss = criterion(outputs, labels.to(get_current_device()))
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    coordinator.print_on_master(f"Epoch [{epoch + 1}/{NUM_EPOCHS}] loss {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-p", "--plugin", default="torch_ddp", choices=["torch_ddp", "low_level_zero", "gemini"])
    parser.add_argument("-r", "--resume", type=int, default=-1)
    parser.add_argument("-c", "--checkpoint", default="./checkpoint")
    parser.add_argument("-i", "--interval", type=int, default=2)
    args = parser.parse_args()
    if args.interval > 0:
        Path(args.checkpoint).mkdir(parents=True, exist_ok=True)

    colossalai.launch_from_torch()
    coordinator = DistCoordinator()
    lr = LEARNING_RATE * coordinator.world_size

    booster_kwargs = {}
    if args.plugin == "torch_ddp":
        plugin = TorchDDPPlugin()
    elif args.plugin == "gemini":
        plugin = GeminiPlugin(initial_scale=2**5)
    elif args.plugin == "low_level_zero":
        plugin = LowLevelZeroPlugin(initial_scale=2**5)
    booster = Booster(plugin=plugin, **booster_kwargs)

    train_dataloader, test_dataloader = build_dataloader(6, coordinator, plugin)
    model = build_model(4)
    criterion = nn.CrossEntropyLoss()
    optimizer = HybridAdam(model.parameters(), lr=lr)
    lr_scheduler = MultiStepLR(optimizer, 30, milestones=[2], gamma=1 / 3)
    model, optimizer, criterion, train_dataloader, lr_scheduler = booster.boost(
        model, optimizer, criterion=criterion, dataloader=train_dataloader, lr_scheduler=lr_scheduler
    )
    if args.resume >= 0:
        booster.load_model(model, f"{args.checkpoint}/model_{args.resume}.pth")
        booster.load_optimizer(optimizer, f"{args.checkpoint}/optimizer_{args.resume}.pth")
        booster.load_lr_scheduler(lr_scheduler, f"{args.checkpoint}/lr_scheduler_{args.resume}.pth")

    for epoch in range(max(args.resume, 0), NUM_EPOCHS):
        train_epoch(epoch, model, optimizer, criterion, train_dataloader, booster, coordinator)
        lr_scheduler.step()
        if args.interval > 0 and (epoch + 1) % args.interval == 0:
            booster.save_model(model, f"{args.checkpoint}/model_{epoch + 1}.pth")
            booster.save_optimizer(optimizer, f"{args.checkpoint}/optimizer_{epoch + 1}.pth")
            booster.save_lr_scheduler(lr_scheduler, f"{args.checkpoint}/lr_scheduler_{epoch + 1}.pth")
    assert evaluate(model, test_dataloader, coordinator) > 0.1
    assert os.path.exists(f"{args.checkpoint}/model_2.pth")


if __name__ == "__main__":
    main()
