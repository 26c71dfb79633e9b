"""Learning rates that grow for some steps first, by DeepSpeed's formulas."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch


class Warmup:
    """From a smallest rate to the full one, and then constant or down to zero.

    The first update is at the smallest rate, and so is the second.

    Args:
        optimizer: whose rates are set.
        min_lr: the smallest.
        max_lr: the full one; left out: what the optimizer's groups have.
        num_steps: updates until it is reached; at least 2.
        kind: whether it grows with the logarithm of the step or with the step.
        total_steps: updates until the rate is zero; left out: it stays.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        min_lr: float = 0.0,
        max_lr: float | None = None,
        num_steps: int = 1000,
        kind: Literal["log", "linear"] = "log",
        total_steps: int | None = None,
    ) -> None:
        self._groups = optimizer.param_groups
        self._min = min_lr
        self._max = [group["lr"] if max_lr is None else max_lr for group in self._groups]
        self._steps, self._kind, self._total = max(2, num_steps), kind, total_steps
        self._at = -1
        self._set()

    def step(self) -> None:
        """Set the rates for the next update."""
        self._at += 1
        self._set()

    def get_last_lr(self) -> list[float]:
        """The rate of each group."""
        return [group["lr"] for group in self._groups]

    get_lr = get_last_lr

    def state_dict(self) -> dict[str, Any]:
        return {"last_batch_iteration": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["last_batch_iteration"]

    def _set(self) -> None:
        for group, largest in zip(self._groups, self._max, strict=True):
            group["lr"] = self._min + (largest - self._min) * self._share()

    def _share(self) -> float:
        if self._at < 0:
            return 0.0
        if self._at < self._steps:
            if self._kind == "linear":
                return self._at / self._steps
            return math.log(self._at + 1) / math.log(self._steps)
        if self._total is None:
            return 1.0
        return max(0.0, (self._total - self._at) / max(1.0, self._total - self._steps))
