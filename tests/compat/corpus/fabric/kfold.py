"""Cross-validation: a model for each fold, and all of them judge together in the end."""

import torch
from lightning_fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

FOLDS = 3


def build():
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 2))


fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(8)
points = torch.randn(90, 4)
data = TensorDataset(points, (points.sum(1) > 0).long())
models = [fabric.setup_module(build()) for _ in range(FOLDS)]
optimizers = [fabric.setup_optimizers(torch.optim.Adam(one.parameters(), lr=0.03)) for one in models]
for epoch in range(2):
    for fold in range(FOLDS):
        held = range(fold, len(data), FOLDS)
        rest = sorted(set(range(len(data))) - set(held))
        train = DataLoader(data, batch_size=8, sampler=SubsetRandomSampler(rest))
        test = DataLoader(Subset(data, list(held)), batch_size=8)
        train, test = fabric.setup_dataloaders(train, test)
        model, optimizer = models[fold], optimizers[fold]
        model.train()
        for x, y in train:
            loss = nn.functional.cross_entropy(model(x), y)
            fabric.backward(loss, model=model)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = sum((model(x).argmax(1) == y).sum() for x, y in test)
        right = fabric.all_reduce(right, reduce_op="sum")
        fabric.print(f"epoch {epoch}, fold {fold}: {right}")
votes = torch.stack([model(points).softmax(-1) for model in models]).mean(0)
fabric.print(f"together: {(votes.argmax(1) == data.tensors[1]).float().mean():.2f}")
