"""The model, data and hand-written loop that the tests here compare with."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

STEPS, BATCH, WIDTH = 8, 8, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 3)
        self.register_buffer("scale", torch.full((), 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build() -> Model:
    torch.manual_seed(3)
    return Model()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(BATCH, 4, generator=generator),
            torch.randint(0, 3, (BATCH,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def loss_fn(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
