"""Trains, saves, goes on, and goes back to what it has saved."""

import os

import deepspeed
import torch
import torch.nn.functional as F
from torch import nn

STEPS, SAVED_AT = 8, 4


class Regression(nn.Module):
    def __init__(self, hidden=20):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x, y):
        if self.training:
            self.seen += len(x)
        return F.mse_loss(self.inner(x), y)


def batches(rank, accumulation):
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(STEPS * accumulation):
        x = torch.randn(5, 6, generator=generator)
        yield x, x.prod(1, keepdim=True)


def run(engine, begin):
    steps = engine.gradient_accumulation_steps()
    for number, (x, y) in enumerate(batches(engine.global_rank, steps)):
        if number < begin * steps:
            continue
        loss = engine(x.to(engine.device), y.to(engine.device))
        engine.backward(loss)
        engine.step()
        if engine.is_gradient_accumulation_boundary() is False and engine.global_steps == SAVED_AT:
            if begin == 0 and engine.micro_steps == SAVED_AT * steps:
                engine.save_checkpoint("saved", tag="half", client_state={"steps": engine.global_steps})
    return loss.item()


def main():
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(3)
    model = Regression()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
    engine, _, _, scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config={
            "train_micro_batch_size_per_gpu": 5,
            "gradient_accumulation_steps": 2,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 2},
        },
    )
    first = run(engine, 0)
    path, state = engine.load_checkpoint("saved")
    assert path.startswith(os.path.join("saved", "half")), path
    assert state["steps"] == engine.global_steps == SAVED_AT
    again = run(engine, state["steps"])
    assert abs(first - again) <= 1e-6 * abs(first), (first, again)
    if engine.global_rank == 0:
        print(f"{again:.6f} at lr {engine.get_lr()} after {engine.global_steps} steps")
    path, state = engine.load_checkpoint("nowhere")
    assert path is None


if __name__ == "__main__":
    main()
