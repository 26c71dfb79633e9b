"""Any rank may say that training is over, and all stop in the same step."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


class EarlyStopping:
    def __init__(self, min_delta=0.0, patience=0):
        self.min_delta, self.patience = min_delta, patience
        self.count, self.lowest = 0, float("inf")

    def should_stop(self, loss):
        if loss + self.min_delta < self.lowest:
            self.count, self.lowest = 0, loss
        else:
            self.count += 1
        return self.count >= self.patience


set_seed(42)
accelerator = Accelerator(cpu=True)
inputs = torch.randn(200, 8)
loader = DataLoader(TensorDataset(inputs, inputs @ torch.randn(8, 1)), batch_size=4)
model = nn.Linear(8, 1)
optimizer = optim.Adam(model.parameters(), lr=0.05)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
stopping = EarlyStopping(min_delta=0.01, patience=12)
steps = 0
for epoch in range(3):
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if stopping.should_stop(loss.item()):
            accelerator.set_trigger()
        if accelerator.check_trigger():
            break
    else:
        continue
    break
accelerator.print(f"stopped after {steps} steps")
