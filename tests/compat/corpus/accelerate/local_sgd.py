"""Local SGD: rightly refused on several ranks, where weights would differ between them."""

import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from torch import nn
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(torch.randn(40, 4), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=4) as local_sgd:
    for x in loader:
        with accelerator.accumulate(model):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
