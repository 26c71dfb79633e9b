"""Optimizers whose update of an element depends on others of its tensor, and several in one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, StepLR

from unipar.optimizers.groups import factories


class Momentum(Optimizer):
    """Adds gradients up; how a tensor moves by the sum is the subclass's."""

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
                p.sub_(self.direction(p, moved) * group["lr"])

    def direction(self, p: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Layerwise(Momentum):
    """Momentum whose steps are as long as the tensor that they move, as in LARS and LAMB."""

    def direction(self, p: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        length = p.norm().clamp(min=0.1) / moved.norm().clamp(min=1e-6)
        return moved * length


def layerwise(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return Layerwise([p for _, p in named if p.requires_grad], lr=0.05)


def adafactor(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return Adafactor([p for _, p in named if p.requires_grad], lr=0.02)


class Orthogonal(Momentum):
    """Momentum made orthogonal, as in Muon, whose own matrices are rounded to bf16.

    By that a sum over ranks in another order makes other steps than the reference's.
    """

    def direction(self, p: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        x = moved / moved.norm().clamp(min=1e-6)
        for _ in range(3):  # Newton and Schulz's iteration towards the nearest orthogonal.
            x = 1.5 * x - 0.5 * (x @ x.T @ x)
        return x


def matrices(name: str, parameter: nn.Parameter) -> bool:
    return name.startswith("blocks") and parameter.ndim == 2


def sgd_of(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return SGD([p for _, p in named], lr=0.1, momentum=0.9)


def orthogonal_of(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return Orthogonal([p for _, p in named], lr=0.05)


def adamw_of(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    """Two parameter groups in one of several optimizers."""
    named = list(named)
    plain = [p for _, p in named if p.ndim == 1]
    decayed = [p for _, p in named if p.ndim > 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "lr": 2e-3}]
    return AdamW(groups, lr=5e-3, eps=1e-6, weight_decay=0.0)


def halved(optimizer: Optimizer) -> LRScheduler:
    return StepLR(optimizer, 3, gamma=0.5)


def warmed_up(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, _warmth)


def _warmth(step: int) -> float:
    return min(1.0, (step + 1) / 5)


def two(of_matrices: Any) -> tuple[Any, Any]:
    """One optimizer for the blocks' matrices, and AdamW for the rest; what builds both kinds."""
    build, schedule = factories(
        {
            "matrices": {"target": of_matrices, "params": matrices, "lr_scheduler": halved},
            "rest": {"target": adamw_of, "lr_scheduler": warmed_up},
        },
        None,
    )
    return build, schedule


def sgd_and_adamw(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return two(sgd_of)[0](named)


def orthogonal_and_adamw(named: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return two(orthogonal_of)[0](named)


def each_schedule(optimizer: Optimizer) -> LRScheduler:
    """The scheduler of each of the two, as one."""
    return two(sgd_of)[1](optimizer)


def sgd_and_adamw_by_hand(
    named: Iterable[tuple[str, nn.Parameter]],
) -> list[tuple[Optimizer, LRScheduler]]:
    return _by_hand(named, sgd_of)


def orthogonal_and_adamw_by_hand(
    named: Iterable[tuple[str, nn.Parameter]],
) -> list[tuple[Optimizer, LRScheduler]]:
    return _by_hand(named, orthogonal_of)


def _by_hand(
    named: Iterable[tuple[str, nn.Parameter]], of_matrices: Any
) -> list[tuple[Optimizer, LRScheduler]]:
    named = list(named)
    one = of_matrices([pair for pair in named if matrices(*pair)])
    other = adamw_of([pair for pair in named if not matrices(*pair)])
    return [(one, halved(one)), (other, warmed_up(other))]
