"""Training by ``fit`` on two processes; writes down when it was called and when a step was done."""

import sys
import time
from pathlib import Path

import torch
from torch import nn

import unipar

TIMES = Path(sys.argv[1])


def loss_fn(model, batch):
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


class FirstStep(unipar.Callback):
    def on_step_end(self, run, record):
        with TIMES.open("a") as file:
            file.write(f"{time.time()}\n")


# What a script with data to train on has done before it calls fit.
inputs, targets = torch.randn(256, 32), torch.randint(0, 10, (256,))
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))

called = time.time()
TIMES.write_text(f"{called}\n")
unipar.fit(
    model,
    (inputs, targets),
    strategy="ddp",
    device="cpu",
    devices=2,
    loss=loss_fn,
    optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-3),
    global_batch_size=64,
    steps=1,
    checkpoint=False,
    progress=False,
    callbacks=[FirstStep()],
)
