# A function, argparse, accumulation with a whole number of steps in an epoch, and an evaluation.
import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.fc1 = nn.Linear(6, hidden)
        self.fc2 = nn.Linear(hidden, 3)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    total, count = 0.0, 0
    for x, y in loader:
        total += F.cross_entropy(model(x), y).item() * len(y)
        count += len(y)
    return total / count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--accum", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()

    torch.manual_seed(11)
    x = torch.randn(120, 6)
    y = x[:, :3].argmax(1)
    train_set, val_set = TensorDataset(x[:96], y[:96]), TensorDataset(x[96:], y[96:])
    loader = DataLoader(train_set, batch_size=8, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=24)

    model = Net()
    opt = optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sched = OneCycleLR(opt, max_lr=args.lr, total_steps=args.epochs * 3)
    for epoch in range(args.epochs):
        model.train()
        running = 0.0
        for step, (inputs, target) in enumerate(loader):
            logits = model(inputs)
            loss = F.cross_entropy(logits, target)
            running += loss.item()
            loss = loss / args.accum
            loss.backward()
            if (step + 1) % args.accum == 0:
                nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
                opt.step()
                sched.step()
                opt.zero_grad()
        print(f"epoch {epoch}: {running:.3f}, validation {evaluate(model, val_loader):.3f}")
    torch.save({"model": model.state_dict(), "args": vars(args)}, "net.pt")


if __name__ == "__main__":
    main()
