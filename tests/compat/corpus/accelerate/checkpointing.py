"""Numbered checkpoints with a limit, an object of the script's own in them, and random numbers."""

import random

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Best:
    def __init__(self):
        self.loss, self.seen = float("inf"), 0

    def update(self, loss):
        self.loss, self.seen = min(self.loss, loss), self.seen + 1

    def state_dict(self):
        return {"loss": self.loss, "seen": self.seen}

    def load_state_dict(self, state):
        self.loss, self.seen = state["loss"], state["seen"]


config = ProjectConfiguration(project_dir="run", automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(cpu=True, project_config=config)
set_seed(3)
x = torch.randn(40, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=5)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
best = Best()
accelerator.register_for_checkpointing(best)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


def epoch():
    for x, y in loader:
        optimizer.zero_grad()
        noise = random.random() + float(np.random.rand())
        loss = nn.functional.mse_loss(model(x), y * (1 + noise))
        accelerator.backward(loss)
        optimizer.step()
        best.update(loss.item())


for _ in range(3):
    epoch()
    accelerator.save_state()
seen = best.seen
epoch()
accelerator.load_state()
assert best.seen == seen
epoch()
accelerator.print(f"the best loss was {best.loss:.4f} in {best.seen} batches")
