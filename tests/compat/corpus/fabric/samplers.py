"""Weighted samples, batches of one's own, a loader of one's own, and a stream."""

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import (
    BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset, WeightedRandomSampler,
)


class Doubled(DataLoader):
    """Every batch twice."""

    def __iter__(self):
        for batch in super().__iter__():
            yield batch
            yield batch


class Waves(IterableDataset):
    def __init__(self, rank, size):
        self.numbers = range(rank, 24, size)

    def __iter__(self):
        for number in self.numbers:
            point = torch.full((3,), number / 24)
            yield point, point.sin().sum(0, keepdim=True)


class Halves(BatchSampler):
    """The batches of one rank, by itself."""

    def __init__(self, sampler, batch_size, drop_last, part=slice(None)):
        super().__init__(sampler, batch_size, drop_last)
        self.part = part

    def __iter__(self):
        yield from list(super().__iter__())[self.part]


def main(fabric):
    fabric.seed_everything(21)
    x = torch.randn(60, 3)
    data = TensorDataset(x, x.square().sum(1, keepdim=True))
    weights = torch.linspace(1, 3, 60).tolist()
    weighted = DataLoader(data, batch_size=5, sampler=WeightedRandomSampler(weights, 33))
    doubled = Doubled(data, batch_size=10, shuffle=True)
    stream = DataLoader(Waves(fabric.global_rank, fabric.world_size), batch_size=4)
    loaders = fabric.setup_dataloaders(weighted, doubled, stream)
    own = Halves(RandomSampler(data), 10, True, slice(fabric.global_rank, None, fabric.world_size))
    halves = DataLoader(data, batch_sampler=own)
    loaders.append(fabric.setup_dataloaders(halves, use_distributed_sampler=False))
    model = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
    model, optimizer = fabric.setup(model, torch.optim.RMSprop(model.parameters(), lr=1e-2))
    for epoch in range(2):
        for loader in loaders:
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                fabric.backward(loss)
                optimizer.step()
        fabric.print(f"epoch {epoch}: {loss.item():.4f}")


if __name__ == "__main__":
    Fabric(accelerator="cpu", devices=2, strategy="ddp").launch(main)
