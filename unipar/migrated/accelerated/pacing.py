"""Schedulers that step when the optimizer does."""

from __future__ import annotations

from typing import Any, Protocol


class Pace(Protocol):
    """The steps of a run, as far as a scheduler follows them."""

    step_scheduler_with_optimizer: bool
    adjust_scheduler: bool
    split_batches: bool
    sync_gradients: bool
    optimizer_step_was_skipped: bool

    @property
    def num_replicas(self) -> int: ...


class Paced:
    """A learning rate scheduler under Accelerate's rules.

    A call steps it as often as there are ranks, or once where batches are split; not at all in the
    midst of an accumulation, or where the optimizer has skipped its step.

    Args:
        scheduler: of torch, or like those.
        run: its steps and ranks.
    """

    def __init__(self, scheduler: Any, run: Pace) -> None:
        self.scheduler, self._run = scheduler, run

    def step(self, *args: Any, **kwargs: Any) -> None:
        run, scheduler = self._run, self.scheduler
        if not run.step_scheduler_with_optimizer:
            scheduler.step(*args, **kwargs)
        elif not run.sync_gradients:
            if run.adjust_scheduler:
                # As Accelerate 1.15.0 does it (scheduler.py, AcceleratedScheduler.step).
                scheduler._step_count += 1
        elif not run.optimizer_step_was_skipped:
            for _ in range(1 if run.split_batches else run.num_replicas):
                end = getattr(scheduler, "total_steps", None)
                if run.split_batches or end is None or scheduler._step_count <= end:
                    scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["scheduler"], name)
