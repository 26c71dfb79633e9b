"""DeepSpeed's learning rate schedulers, by its formulas (0.19.8, ``runtime/lr_schedules.py``)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

from unipar.compat.deepspeed_names import SCHEDULES

NAMES = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
"""Those that a configuration may name, beside torch's."""

Rates = float | list[float] | tuple[float, ...]


class _Schedule(ABC):
    """Rates as a function of the number of updates so far, the first of which is 0."""

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = optimizer
        self.last_batch_iteration = last_batch_iteration

    @abstractmethod
    def get_lr(self) -> list[float]:
        """The rate of each group for the next update."""

    def get_last_lr(self) -> list[float]:
        """The rate of each group, as it was set last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Set the rates for the next update."""
        before = self.last_batch_iteration
        self.last_batch_iteration = (
            before + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """How far it has come."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, Any]) -> None:
        """Go on from there."""
        self.last_batch_iteration = sd["last_batch_iteration"]

    def _set(self, rates: list[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self._last_lr = rates

    def _each(self, given: Rates, name: str) -> list[float]:
        groups = len(self.optimizer.param_groups)
        if not isinstance(given, (list, tuple)):
            return [given] * groups
        if len(given) != groups:
            raise ValueError(f"expected {groups} values for {name}, got {len(given)}")
        return list(given)


class WarmupLR(_Schedule):
    """From the smallest rate to the full one, and then constant."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if warmup_max_lr is None:
            warmup_max_lr = [group["lr"] for group in optimizer.param_groups]
        self.min_lrs = self._each(warmup_min_lr, "min_lr")
        self.max_lrs = self._each(warmup_max_lr, "max_lr")
        self.warmup_num_steps, self.warmup_type = _warmup(warmup_num_steps), warmup_type
        if last_batch_iteration == -1:
            self._set(self.get_lr())

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < 0:
            return self.min_lrs
        share = self._share()
        return [
            low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
        ]

    def _share(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return _warming(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)
        return self._after()

    def _after(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """From the smallest rate to the full one, and then in a line down to zero."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type,
            last_batch_iteration,
        )  # fmt: skip

    def _after(self) -> float:
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Schedule):
    """From a share of the optimizer's rates to these, and then down by a cosine."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.total_num_steps, self.cos_min_ratio = total_num_steps, cos_min_ratio
        self.warmup_min_ratio, self.warmup_type = warmup_min_ratio, warmup_type
        self.warmup_num_steps = _warmup(warmup_num_steps)
        self.org_lrs = [group["lr"] for group in optimizer.param_groups]
        if last_batch_iteration == -1:
            self._set(self.get_lr())

    def get_lr(self) -> list[float]:
        ratio = 0.0 if self.last_batch_iteration < 0 else self.get_lr_ratio()
        return [rate * ratio for rate in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """The share of the optimizer's rates for the next update."""
        at, warmup = self.last_batch_iteration, self.warmup_num_steps
        if at < warmup:
            low = self.warmup_min_ratio
            return low + _warming(at, warmup, self.warmup_type) * (1 - low)
        progress = min(1.0, (at - warmup + 1) / max(1, self.total_num_steps - warmup))
        low = self.cos_min_ratio
        return max(0.0, low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)


class LRRangeTest(_Schedule):
    """Rates that grow without end, to find the largest one that trains."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._each(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        if last_batch_iteration == -1:
            self._set(self.min_lr)

    def get_lr(self) -> list[float]:
        steps = (self.last_batch_iteration + 1) / self.step_size
        grown = 1 + self.step_rate * (math.floor(steps) if self.staircase else steps)
        return [rate * grown for rate in self.min_lr]


class OneCycle(_Schedule):
    """Rates that go up and down once, the momentum the other way, and then decay."""

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float = 0.8,
        cycle_max_mom: float = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        first = cycle_first_step_size
        second = first if cycle_second_step_size is None else cycle_second_step_size
        self._sizes = float(first), float(second)
        stairs = cycle_first_stair_count
        other = stairs if cycle_second_stair_count is None else cycle_second_stair_count
        self._stairs = stairs, other
        self.total_size = self._sizes[0] + self._sizes[1]
        self.decay_step_size = decay_step_size
        self.min_lrs = self._each(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._each(cycle_max_lr, "cycle_max_lr")
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        self._momenta = cycle_min_mom, cycle_max_mom
        if last_batch_iteration == -1:
            self._set(self.min_lrs)
            if self.cycle_momentum:
                self._set_momentum(cycle_min_mom)

    def get_lr(self) -> list[float]:
        if self.last_batch_iteration < self.total_size:
            share = self._height()
            return [
                low + (high - low) * share
                for low, high in zip(self.min_lrs, self.max_lrs, strict=True)
            ]
        return [rate / self._decayed(self.decay_lr_rate) for rate in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """The betas of each group for the next update; the second is 0.99, whatever it was."""
        if not self.cycle_momentum:
            return None
        low, high = self._momenta
        if self.last_batch_iteration < self.total_size:
            momentum = high - (high - low) * self._height()
        else:
            momentum = high * self._decayed(self.decay_mom_rate)
        return [(momentum, 0.99)] * len(self.optimizer.param_groups)

    def step(self, batch_iteration: int | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Set rates and momentum for the next update."""
        super().step(batch_iteration)
        momenta = self.get_mom()
        if momenta is not None:
            self._set_momentum(momenta[0][0])

    def _set_momentum(self, momentum: float) -> None:
        for group in self.optimizer.param_groups:
            group["betas"] = (momentum, 0.99)

    def _height(self) -> float:
        first, second = self._sizes
        at = (self.last_batch_iteration + 1) % self.total_size
        rising = at <= first
        share = at / first if rising else (self.total_size - at) / second
        stairs = self._stairs[0 if rising else 1]
        return math.floor(share * stairs) / stairs if stairs > 0 else share

    def _decayed(self, rate: float) -> float:
        if self.decay_step_size == 0 or rate == 0:
            return 1.0
        return 1 + rate * (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size


def _warmup(num_steps: int) -> int:
    if not isinstance(num_steps, int) or num_steps <= 0:
        raise ValueError(f"warmup_num_steps must be a positive integer, got {num_steps}")
    return max(2, num_steps)


def _warming(at: int, num_steps: int, kind: str) -> float:
    """The share of the way up; by the logarithm unless it is ``linear``."""
    return at / num_steps if kind == "linear" else math.log(at + 1) / math.log(num_steps)


__getattr__ = SCHEDULES.refusing(__name__)
