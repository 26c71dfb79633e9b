"""Images by a small convolutional net; the loop in a function, settings from the command line."""

import argparse

import lightning as L
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.dropout = nn.Dropout(0.25)
        self.fc = nn.Linear(6 * 9, 4)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return F.log_softmax(self.fc(self.dropout(x.flatten(1))), dim=1)


def images(count, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, 8, 8, generator=generator)
    return TensorDataset(x, x.flatten(1)[:, :4].argmax(1))


def run(args):
    fabric = L.Fabric(accelerator="cpu", devices=2)
    fabric.launch()
    L.seed_everything(args.seed)
    with fabric.rank_zero_first(local=False):
        train, test = images(117, 0), images(41, 1)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(test, batch_size=20)
    loader, test_loader = fabric.setup_dataloaders(loader, test_loader)

    model = Net()
    optimizer = optim.Adadelta(model.parameters(), lr=args.lr)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=args.gamma)
    for epoch in range(1, args.epochs + 1):
        model.train()
        for index, (data, target) in enumerate(loader):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            fabric.backward(loss)
            optimizer.step()
            if index % 4 == 0:
                done = index * len(data) * fabric.world_size
                fabric.print(f"epoch {epoch} [{done}/{len(loader.dataset)}] {loss.item():.6f}")
        scheduler.step()
        model.eval()
        missed, right = 0.0, torch.tensor(0, device=fabric.device)
        with torch.no_grad():
            for data, target in test_loader:
                output = model(data)
                missed += F.nll_loss(output, target, reduction="sum")
                right += (output.argmax(dim=1) == target).sum()
        missed = fabric.all_reduce(missed, reduce_op="sum") / len(test)
        right = fabric.all_gather(right).sum()
        fabric.print(f"test: loss {missed:.4f}, {right} of {len(test)} right")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    run(parser.parse_args())
