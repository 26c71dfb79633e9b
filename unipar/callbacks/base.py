"""The calls of the training loop to the outside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from unipar.callbacks.records import RunInfo, RunResult, StepRecord


class Callback:
    """Something that watches a run. Every method does nothing unless overridden.

    The methods are called on rank 0; with :attr:`every_rank` on all of them. A callback must not
    make collectives, nor change weights, unless it runs on every rank. What it raises ends the run.

    Attributes:
        every_rank: whether the methods are called on every rank.
        lags: whether :meth:`on_step_end` may come when the next step was taken, too, since it looks
            at nothing but the record. If all of a run's do, an accelerator is not waited for after
            each step.
    """

    every_rank: bool = False
    lags: bool = False

    def on_run_start(self, run: RunInfo) -> None:
        """Before the first step, when the model is ready."""

    def on_step_end(self, run: RunInfo, record: StepRecord) -> None:
        """After each training step."""

    def on_evaluate_end(self, run: RunInfo, step: int, metrics: Mapping[str, float]) -> None:
        """After each evaluation.

        Args:
            run: the run.
            step: the number of steps taken by then.
            metrics: the evaluation's values by their plain names: ``loss``, ``accuracy``, …
        """

    def on_checkpoint(self, run: RunInfo, step: int, path: Path) -> None:
        """After a checkpoint has been written whole."""

    def on_run_end(self, run: RunInfo, result: RunResult | None) -> None:
        """Last of all, however the run ended; ``result`` is ``None`` when it failed."""

    def on_exception(self, run: RunInfo, error: BaseException) -> None:
        """When the run fails or is interrupted, before :meth:`on_run_end`."""
