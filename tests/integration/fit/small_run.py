"""The small run that the tests here vary, and the hand-written loop that it has to equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from unipar import RunResult, fit, launch
from unipar.data.order import epoch_order
from unipar.world import Placement

BATCH, STEPS, SAMPLES = 8, 6, 28


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inward = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.dropout = nn.Dropout(dropout)
        self.outward = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = block(x)
        return self.outward(self.dropout(x))


def build(dropout: float = 0.0) -> Net:
    torch.manual_seed(1)
    return Net(dropout)


def data(num_samples: int = SAMPLES) -> TensorDataset:
    """Four epochs of :data:`STEPS` steps have a ragged batch in them: 28 is 3 and a half of 8."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(num_samples, 4, generator=generator)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    return TensorDataset(x, y)


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def make_adamw(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=0.02)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def accuracy(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (predictions.argmax(-1) == targets).float().mean()


def reference(
    steps: int = STEPS,
    *,
    model: nn.Module | None = None,
    loss: Callable[[Any, Any], torch.Tensor] = loss_fn,
    scheduler: bool = False,
    seed: int = 0,
) -> tuple[list[float], nn.Module]:
    """Losses and the trained model of the plain loop."""
    model = build() if model is None else model
    optimizer = make_adamw(model.named_parameters())
    schedule = make_scheduler(optimizer) if scheduler else None
    losses: list[float] = []
    epoch = 0
    while len(losses) < steps:
        order = epoch_order(SAMPLES, seed=seed, epoch=epoch, shuffle=True)
        for indices in order.split(BATCH)[: steps - len(losses)]:
            value = loss(model, data()[indices])
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
            losses.append(value.item())
        epoch += 1
    return losses, model


def settings(directory: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of ``fit`` for the small run; a change to ``...`` leaves one out."""
    values: dict[str, Any] = {
        "loss": loss_fn,
        "optimizer": make_adamw,
        "strategy": "single",
        "devices": 1,
        "global_batch_size": BATCH,
        "steps": STEPS,
        "output_dir": directory,
        "progress": False,
        "log_level": "warning",
        "checkpoint": False,
        **changes,
    }
    return {key: value for key, value in values.items() if value is not ...}


def fit_in_world(
    placement: Placement, directory: Path, model: Any = None, samples: Any = None, **changes: Any
) -> RunResult:
    """``fit`` on one rank of a world that is there already, as under ``torchrun``."""
    launch.detect = lambda: placement  # pyright: ignore[reportAttributeAccessIssue]
    return fit(
        build() if model is None else model,
        data() if samples is None else samples,
        **settings(directory, **changes),
    )


class Watched(Dataset):
    """The small data set; sample ``index`` of it calls ``trap`` first."""

    def __init__(self, index: int, trap: Callable[[], Any]) -> None:
        self.samples, self.index, self.trap = data(), index, trap

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index == self.index:
            self.trap()
        return self.samples[index]
