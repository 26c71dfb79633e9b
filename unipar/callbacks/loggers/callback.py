"""The callback that hands a run's metrics to its loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unipar.callbacks.base import Callback
from unipar.callbacks.loggers.base import Logger
from unipar.callbacks.records import RunInfo, RunResult, StepRecord


class LoggerCallback(Callback):
    """Feeds loggers with training and evaluation metrics.

    Args:
        loggers: where the metrics go.
        every: log every so many training steps, and the first and last of all; evaluations always.
    """

    lags = True

    def __init__(self, loggers: Sequence[Logger], every: int = 1) -> None:
        self.loggers = list(loggers)
        self.every = every
        self._open: list[Logger] = []

    def on_run_start(self, run: RunInfo) -> None:
        for logger in self.loggers:
            self._open.append(logger)
            logger.start(run)

    def on_step_end(self, run: RunInfo, record: StepRecord) -> None:
        step = record.step
        if step % self.every and step not in (run.start_step + 1, run.total_steps):
            return
        metrics = step_metrics(record)
        for logger in self._open:
            logger.log(metrics, step)

    def on_evaluate_end(self, run: RunInfo, step: int, metrics: Mapping[str, float]) -> None:
        named = {f"eval/{name}": float(value) for name, value in metrics.items()}
        for logger in self._open:
            logger.log(named, step)

    def on_exception(self, run: RunInfo, error: BaseException) -> None:
        while self._open:
            self._open.pop().fail(error)

    def on_run_end(self, run: RunInfo, result: RunResult | None) -> None:
        while self._open:
            self._open.pop().close()


def step_metrics(record: StepRecord) -> dict[str, float]:
    """Return the metrics to log of a training step; a value that was not computed is left out."""
    metrics: dict[str, float] = {"epoch": record.epoch, "loss": record.loss}
    if record.grad_norm is not None:
        metrics["grad_norm"] = record.grad_norm
    if record.lr is not None:
        metrics["lr"] = record.lr
    metrics["num_items"] = record.num_items
    metrics["items_per_second"] = record.items_per_second
    metrics["seconds"] = record.seconds
    metrics["peak_memory"] = record.peak_memory
    if record.skipped:
        metrics["skipped"] = 1
    return metrics
