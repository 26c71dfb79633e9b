"""Optimizers whose update of an element depends on others of its tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Adafactor, Optimizer


class Layerwise(Optimizer):
    """Momentum whose steps are as long as the tensor that they move, as in LARS and LAMB."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                moved = state["momentum"].mul_(group["momentum"]).add_(p.grad)
                length = p.norm().clamp(min=0.1) / moved.norm().clamp(min=1e-6)
                p.sub_(moved * length * group["lr"])


def layerwise(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return Layerwise([p for _, p in named if p.requires_grad], lr=0.05)


def adafactor(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return Adafactor([p for _, p in named if p.requires_grad], lr=0.02)
