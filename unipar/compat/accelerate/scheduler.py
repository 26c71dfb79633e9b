"""Schedulers that step when the optimizer does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from unipar.compat.accelerate.state import GradientState
from unipar.compat.deepspeed_names import SCHEDULES
from unipar.compat.optimizers import PreparedOptimizer
from unipar.compat.tables import Table


class Paced:
    """A learning rate scheduler under Accelerate's rules.

    A call steps it as often as there are ranks, or once where batches are split; not at all in the
    midst of an accumulation, or where the optimizer has skipped its step.

    Args:
        scheduler: of torch, or like those.
        optimizers: those that it follows.
        state: how far a step has come.
        times: how often a call steps it.
        with_optimizer: whether it follows the optimizers at all.
        split: whether batches are cut up among ranks.

    Attributes:
        scheduler: the script's.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: Iterable[PreparedOptimizer],
        state: GradientState,
        *,
        times: int,
        with_optimizer: bool,
        split: bool,
    ) -> None:
        self.scheduler, self._state = scheduler, state
        # One that a script has left over from before keeps no model.
        self.optimizers = WeakSet(optimizers)
        self._times, self._with_optimizer, self._split = times, with_optimizer, split

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step it, as often as the rules say."""
        scheduler = self.scheduler
        if not self._with_optimizer:
            scheduler.step(*args, **kwargs)
        elif self._state.sync_gradients and not any(
            one.step_was_skipped for one in self.optimizers
        ):
            for _ in range(1 if self._split else self._times):
                # As Accelerate 1.15.0 does it (scheduler.py, AcceleratedScheduler.step).
                end = getattr(scheduler, "total_steps", None)
                if self._split or end is None or scheduler._step_count <= end:
                    scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["scheduler"], name)


class Followed(Paced):
    """A schedule that its optimizer steps after each update, as DeepSpeed's engine does."""

    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Nothing."""


def is_deepspeeds(one: Any) -> bool:
    """Whether it is one of DeepSpeed's schedules, which Accelerate knows by their names."""
    row = SCHEDULES.find(type(one).__name__)
    return row is not None and row.fate == "kept"


AcceleratedScheduler = Paced
"""Accelerate's name of it."""

__getattr__ = Table("accelerate.scheduler").refusing(__name__)
