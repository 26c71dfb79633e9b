"""Pairs told from all pairs of all ranks: embeddings are gathered with their gradients."""

import torch
from lightning_fabric import Fabric, seed_everything
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 8))
        self.right = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 8))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, a, b):
        return F.normalize(self.left(a), dim=-1), F.normalize(self.right(b), dim=-1), self.scale.exp()


def main(fabric: Fabric, epochs: int):
    seed_everything(12)
    hidden = torch.randn(96, 3)
    a, b = hidden @ torch.randn(3, 6), hidden @ torch.randn(3, 5)
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(a, b), batch_size=8, shuffle=True))
    model = Towers()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=5e-3))
    for epoch in range(epochs):
        for a, b in loader:
            left, right, scale = model(a, b)
            every = fabric.all_gather((left, right), sync_grads=True)
            left, right = (one.flatten(0, 1) for one in every)
            logits = scale * left @ right.T
            places = torch.arange(len(logits), device=fabric.device)
            loss = (F.cross_entropy(logits, places) + F.cross_entropy(logits.T, places)) / 2
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
        same = fabric.broadcast(loss.item(), src=1)
        fabric.print(f"epoch {epoch}: {loss.item():.4f}, on the other {same:.4f}")
    return loss.item()


if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch(main, epochs=3)
