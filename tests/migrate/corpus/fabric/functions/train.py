"""Image classification with Lightning Fabric: python train.py --devices 2"""
import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from lightning_fabric import Fabric, seed_everything
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.1)
        self.fc = nn.Linear(4 * 9, 3)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.bn(self.conv1(x))), 2)
        return F.log_softmax(self.fc(self.dropout(x.flatten(1))), dim=1)


def get_data(n, seed):
    g = torch.Generator().manual_seed(seed)
    images = torch.rand(n, 1, 8, 8, generator=g)
    return TensorDataset(images, images.flatten(1)[:, :3].argmax(1))


def test(fabric, model, loader):
    model.eval()
    test_loss, correct, count = 0.0, 0, 0
    with torch.no_grad():
        for data, target in loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum")
            correct += (output.argmax(dim=1) == target).sum()
            count += len(target)
    # all_gather and sum over the ranks
    test_loss = fabric.all_gather(test_loss).sum() / fabric.all_reduce(count, reduce_op="sum")
    accuracy = fabric.all_reduce(correct / count)
    fabric.print(f"\nTest set: average loss: {test_loss:.4f}, accuracy: {accuracy:.1%}\n")


def run(hparams):
    fabric = Fabric(accelerator="cpu", devices=hparams.devices, strategy="ddp")
    fabric.launch()

    seed_everything(hparams.seed)

    # only one process prepares the data
    with fabric.rank_zero_first(local=False):
        train_set, test_set = get_data(130, 0), get_data(40, 1)
    train_loader = DataLoader(train_set, batch_size=hparams.batch_size, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=16)
    train_loader, test_loader = fabric.setup_dataloaders(train_loader, test_loader)

    model = Net()  # remove call to .to(device)
    optimizer = optim.Adadelta(model.parameters(), lr=hparams.lr)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = StepLR(optimizer, step_size=1, gamma=hparams.gamma)

    for epoch in range(1, hparams.epochs + 1):
        model.train()
        for batch_idx, (data, target) in enumerate(train_loader):
            # NOTE: no need to call `.to(device)` on the data
            optimizer.zero_grad()
            output = model(data)
            loss = F.nll_loss(output, target)
            fabric.backward(loss)  # instead of loss.backward()
            optimizer.step()
            if batch_idx % hparams.log_interval == 0:
                fabric.print(
                    f"Train Epoch: {epoch} [{batch_idx * len(data)}/{len(train_loader.dataset)}"
                    f" ({100.0 * batch_idx / len(train_loader):.0f}%)]\tLoss: {loss.item():.6f}"
                )
        scheduler.step()
        test(fabric, model, test_loader)

    if hparams.save_model:
        fabric.save("net.pt", model.state_dict())


def main():
    parser = argparse.ArgumentParser(description="Fabric example")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=4)
    parser.add_argument("--save-model", action="store_true", default=True)
    run(parser.parse_args())


if __name__ == "__main__":
    main()
