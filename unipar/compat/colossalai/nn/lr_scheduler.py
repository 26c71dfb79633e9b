"""Schedules under Colossal-AI's names, with the same rates at each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim import lr_scheduler as torchs
from torch.optim.lr_scheduler import LRScheduler, _enable_get_lr_call

from unipar.compat.colossalai_names import SCHEDULES

__all__ = [
    "CosineAnnealingLR", "CosineAnnealingWarmupLR", "ExponentialLR", "FlatAnnealingLR",
    "FlatAnnealingWarmupLR", "LambdaLR", "LinearWarmupLR", "MultiStepLR", "MultiStepWarmupLR",
    "MultiplicativeLR", "OneCycleLR", "PolynomialLR", "PolynomialWarmupLR", "StepLR",
]  # fmt: skip


class _Following(LRScheduler):
    """A warm-up, a flat part, and then another schedule, which steps from there.

    Args:
        optimizer: whose rates it sets.
        warmup: steps in which rates rise to their own.
        flat: steps in which they stay there.
        after: the schedule that follows.
        last_epoch: as all schedules take it.
    """

    def __init__(
        self, optimizer: Optimizer, warmup: int, flat: int, after: LRScheduler, last_epoch: int
    ) -> None:
        self.warmup_epochs, self.delay_epochs = int(warmup), flat
        self.after_scheduler, self.finished = after, False
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        if self.last_epoch < self.warmup_epochs:
            return [(self.last_epoch + 1) / self.warmup_epochs * lr for lr in self.base_lrs]
        if self.last_epoch < self.warmup_epochs + self.delay_epochs:
            return self.base_lrs
        if not self.finished:
            self.after_scheduler.base_lrs = self.base_lrs
            self._reset()
            self.finished = True
        # torch 2.13, torch/optim/lr_scheduler.py: get_lr() warns where step() does not call it.
        with _enable_get_lr_call(self.after_scheduler):
            return self.after_scheduler.get_lr()

    def _reset(self) -> None:
        """Change rates before the schedule that follows sees them."""

    def step(self, epoch: int | None = None) -> None:
        if not self.finished:
            super().step(epoch)
            return
        # As there, where epochs that are named count from the end of the warm-up alone.
        counted = self.warmup_epochs or self.delay_epochs
        self.after_scheduler.step(None if epoch is None else epoch - counted)
        self._last_lr = self.after_scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        kept = {k: v for k, v in self.__dict__.items() if k not in ("optimizer", "after_scheduler")}
        return {
            **kept,
            "after_scheduler_type": type(self.after_scheduler).__name__,
            "after_scheduler_dict": self.after_scheduler.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.after_scheduler.load_state_dict(state_dict["after_scheduler_dict"])
        super().load_state_dict(
            {k: v for k, v in state_dict.items() if not k.startswith("after_scheduler_")}
        )


class CosineAnnealingLR(torchs.CosineAnnealingLR):
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        eta_min: float = 0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer, total_steps, eta_min=eta_min, last_epoch=last_epoch)


class CosineAnnealingWarmupLR(_Following):
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        after = torchs.CosineAnnealingLR(
            optimizer, total_steps - warmup_steps, eta_min=eta_min, last_epoch=last_epoch
        )
        super().__init__(optimizer, warmup_steps, 0, after, last_epoch)


class FlatAnnealingLR(_Following):
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        pct_start: float = 0.72,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        flat = _flat_steps(total_steps, pct_start)
        after = torchs.CosineAnnealingLR(optimizer, total_steps - flat)
        super().__init__(optimizer, 0, flat, after, last_epoch)


class FlatAnnealingWarmupLR(_Following):
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        flat = _flat_steps(total_steps - warmup_steps, pct_start)
        after = torchs.CosineAnnealingLR(
            optimizer, total_steps - warmup_steps - flat, eta_min=eta_min
        )
        super().__init__(optimizer, warmup_steps, flat, after, last_epoch)

    def _reset(self) -> None:
        for group, lr in zip(self.optimizer.param_groups, self.base_lrs, strict=True):
            group["lr"] = lr


def _flat_steps(steps: int, share: float) -> int:
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"pct_start must >= 0.0 and <= 1.0, got {share}")
    return int(steps * share)


class LinearWarmupLR(LRScheduler):
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        self.warmup_steps, self.total_steps = warmup_steps, total_steps
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_lr(self) -> list[Any]:
        if self.last_epoch < self.warmup_steps:
            share = (self.last_epoch + 1) / (self.warmup_steps + 1)
        else:
            share = (self.total_steps - self.last_epoch) / (self.total_steps - self.warmup_steps)
        return [share * lr for lr in self.base_lrs]


class MultiStepLR(torchs.MultiStepLR):
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        super().__init__(optimizer, milestones or [], gamma=gamma, last_epoch=last_epoch)


class MultiStepWarmupLR(_Following):
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        if not milestones:
            raise ValueError("milestones cannot be empty")
        left = [one - warmup_steps for one in milestones if one >= warmup_steps]
        after = torchs.MultiStepLR(optimizer, milestones=left, gamma=gamma)
        super().__init__(optimizer, warmup_steps, 0, after, last_epoch)


class OneCycleLR(torchs.OneCycleLR):
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        pct_start: float = 0.3,
        anneal_strategy: Any = "cos",
        cycle_momentum: bool = True,
        base_momentum: float = 0.85,
        max_momentum: float = 0.95,
        div_factor: float = 25.0,
        final_div_factor: float = 10000.0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            optimizer,
            [group["lr"] for group in optimizer.param_groups],
            total_steps=total_steps,
            pct_start=pct_start,
            anneal_strategy=anneal_strategy,
            cycle_momentum=cycle_momentum,
            base_momentum=base_momentum,
            max_momentum=max_momentum,
            div_factor=div_factor,
            final_div_factor=final_div_factor,
            last_epoch=last_epoch,
        )


class PolynomialLR(LRScheduler):
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        if end_lr < 0:
            raise ValueError(f"end_lr must >= 0, got {end_lr}")
        self.total_steps, self.end_lr, self.power = total_steps, end_lr, power
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_lr(self) -> list[Any]:
        left = 1 - min(self.last_epoch, self.total_steps) / self.total_steps
        return [(lr - self.end_lr) * left**self.power + self.end_lr for lr in self.base_lrs]


class PolynomialWarmupLR(_Following):
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
        **kwargs: Any,
    ) -> None:
        after = PolynomialLR(optimizer, total_steps - warmup_steps, end_lr=end_lr, power=power)
        super().__init__(optimizer, warmup_steps, 0, after, last_epoch)


class LambdaLR(torchs.LambdaLR):
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        lr_lambda: Callable[[int], float] | Any = None,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, lr_lambda, last_epoch=last_epoch)


class MultiplicativeLR(torchs.MultiplicativeLR):
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        lr_lambda: Callable[[int], float] | Any = None,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, lr_lambda, last_epoch=last_epoch)


class StepLR(torchs.StepLR):
    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        step_size: int = 1,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, step_size, gamma=gamma, last_epoch=last_epoch)


class ExponentialLR(torchs.ExponentialLR):
    def __init__(
        self, optimizer: Optimizer, total_steps: int, gamma: float = 1.0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, gamma, last_epoch=last_epoch)


__getattr__ = SCHEDULES.refusing(__name__)
