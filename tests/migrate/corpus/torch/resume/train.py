import argparse
import pathlib

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, random_split


class AutoEncoder(nn.Module):
    def __init__(self, size=20, code=4):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(size, 16), nn.ELU(), nn.Linear(16, code))
        self.decoder = nn.Sequential(nn.Linear(code, 16), nn.ELU(), nn.Linear(16, size))

    def forward(self, x):
        return self.decoder(self.encoder(x))


def save_checkpoint(path, model, optimizer, scheduler, epoch, best):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        dict(
            model=model.state_dict(),
            optimizer=optimizer.state_dict(),
            scheduler=scheduler.state_dict(),
            epoch=epoch,
            best=best,
            rng=torch.get_rng_state(),
        ),
        path,
    )


def load_checkpoint(path, model, optimizer, scheduler):
    ckpt = torch.load(path, weights_only=True)
    model.load_state_dict(ckpt["model"])
    optimizer.load_state_dict(ckpt["optimizer"])
    scheduler.load_state_dict(ckpt["scheduler"])
    torch.set_rng_state(ckpt["rng"])
    return ckpt["epoch"] + 1, ckpt["best"]


def run_validation(model, loader, criterion):
    model.eval()
    losses = []
    with torch.inference_mode():
        for (x,) in loader:
            losses.append(criterion(model(x), x).item())
    model.train()
    return sum(losses) / len(losses)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--dir", type=pathlib.Path, default=pathlib.Path("ckpt"))
    parser.add_argument("--resume", type=pathlib.Path)
    opts = parser.parse_args(argv)

    torch.manual_seed(99)
    basis = torch.randn(3, 20)
    full = TensorDataset(torch.randn(130, 3) @ basis)
    train_set, val_set = random_split(full, [100, 30], generator=torch.Generator().manual_seed(1))
    train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=16)

    model = AutoEncoder()
    criterion = nn.MSELoss()
    optimizer = optim.Adamax(model.parameters(), lr=0.02)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)

    first, best = 0, float("inf")
    if opts.resume is not None:
        first, best = load_checkpoint(opts.resume, model, optimizer, scheduler)
        print("resumed at epoch", first)

    for epoch in range(first, opts.epochs):
        for (x,) in train_loader:
            loss = criterion(model(x), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        val = run_validation(model, val_loader, criterion)
        scheduler.step(val)
        save_checkpoint(opts.dir / "last.pt", model, optimizer, scheduler, epoch, best)
        if val < best:
            best = val
            save_checkpoint(opts.dir / "best.pt", model, optimizer, scheduler, epoch, best)
        print(f"{epoch:3d} {val:.5f}")


if __name__ == "__main__":
    main()
