"""Half precision with a gradient scaler, and clipping of unscaled gradients."""
from argparse import ArgumentParser

import torch
from torch import nn
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader, TensorDataset


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, padding=1)
        self.fc = nn.Linear(4 * 6 * 6, 5)

    def forward(self, x):
        return self.fc(torch.relu(self.conv(x)).flatten(1))


def train_epoch(model, loader, optimizer, scaler, criterion, max_norm=1.0):
    model.train()
    for images, labels in loader:
        optimizer.zero_grad()
        with autocast("cpu", dtype=torch.float16):
            loss = criterion(model(images), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        scaler.step(optimizer)
        scaler.update()


def accuracy(model, loader):
    model.eval()
    hits = total = 0
    with torch.inference_mode():
        for images, labels in loader:
            hits += (model(images).argmax(-1) == labels).sum().item()
            total += labels.numel()
    return hits / total


def main(args):
    torch.manual_seed(args.seed)
    images = torch.randn(96, 1, 6, 6)
    labels = images.flatten(1)[:, :5].argmax(1)
    loader = DataLoader(TensorDataset(images, labels), batch_size=12, shuffle=True, drop_last=True)
    model = ConvNet()
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    scaler = GradScaler("cpu")
    for epoch in range(args.epochs):
        train_epoch(model, loader, optimizer, scaler, criterion)
        print(epoch, accuracy(model, loader))


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=11)
    main(parser.parse_args())
