"""Several folds with one Accelerator: what was prepared is let go of between them."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

accelerator = Accelerator(cpu=True)
set_seed(11)
x = torch.randn(36, 5)
data = TensorDataset(x, (x.sum(1) > 0).long())
folds = torch.randperm(len(data)).chunk(3)
predictions, references = [], []
for number, fold in enumerate(folds):
    rest = torch.cat([one for at, one in enumerate(folds) if at != number])
    train_loader = DataLoader(Subset(data, rest.tolist()), batch_size=4, shuffle=True)
    valid_loader = DataLoader(Subset(data, fold.tolist()), batch_size=8)
    model = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, train_loader, valid_loader = accelerator.prepare(
        model, optimizer, train_loader, valid_loader
    )
    for inputs, labels in train_loader:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    for inputs, labels in valid_loader:
        with torch.no_grad():
            logits = model(inputs)
        given, expected = accelerator.gather_for_metrics((logits.argmax(-1), labels))
        predictions.append(given)
        references.append(expected)
    model, optimizer = accelerator.free_memory(model, optimizer)
predictions, references = torch.cat(predictions), torch.cat(references)
assert len(references) == len(data)
accelerator.print(f"{(predictions == references).float().mean().item():.3f}")
