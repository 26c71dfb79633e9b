"""An optimizer that steps by other weights than a model is evaluated with."""

from __future__ import annotations

from typing import Any

import torch

RATE, BETA = 0.1, 0.9


class ScheduleFree(torch.optim.Optimizer):
    """SGD of the package schedulefree, in short."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": RATE, "k": 0, "train_mode": False})

    @torch.no_grad()
    def _set(self, mode: bool, weight: float) -> None:
        for group in self.param_groups:
            for parameter in group["params"] if group["train_mode"] != mode else ():
                if "z" in self.state[parameter]:
                    parameter.lerp_(self.state[parameter]["z"], weight)
            group["train_mode"] = mode

    def train(self) -> None:
        self._set(True, 1 - BETA)

    def eval(self) -> None:
        self._set(False, 1 - 1 / BETA)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            if not group["train_mode"]:
                raise RuntimeError("the optimizer is not in its mode for training")
            group["k"] += 1
            part = 1 / group["k"]
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.clone())
                parameter.lerp_(z, part)
                parameter.add_(parameter.grad, alpha=group["lr"] * (BETA * (1 - part) - 1))
                z.sub_(parameter.grad, alpha=group["lr"])
