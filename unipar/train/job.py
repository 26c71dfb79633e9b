"""The user's own objects that a run needs besides its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from unipar.callbacks import Callback, Logger
from unipar.config import CheckpointConfig, RunConfig
from unipar.errors import ConfigError, did_you_mean
from unipar.evaluation.evaluate import Metric, Predict
from unipar.loss import LossFn
from unipar.optimizers.named import LOSS
from unipar.strategy import ModelFactory, OptimizerFactory, SchedulerFactory


@dataclass
class Job:
    """One call of ``fit``, as every process of the run gets it.

    Attributes:
        config: the resolved config.
        output_dir: where the run's files go.
        checkpoint_dir: where checkpoints are written; ``None`` writes none.
        loss: ``None`` takes that of the model's output.
        weights_dir: where to leave the final weights when no checkpoint holds them.
    """

    model: nn.Module | ModelFactory
    data: Any
    config: RunConfig
    output_dir: Path
    checkpoint_dir: Path | None
    optimizer: OptimizerFactory
    loss: LossFn | None
    lr_scheduler: SchedulerFactory | None = None
    eval_data: Any = None
    metrics: Mapping[str, Metric] | None = None
    predict: Predict | None = None
    callbacks: Sequence[Callback] = ()
    loggers: Sequence[str | Logger] = ()
    weights_dir: Path | None = None

    @property
    def remote(self) -> str | None:
        """The URL that checkpoints are copied to, if there is one."""
        settings = self.config.checkpoint
        return settings.remote if isinstance(settings, CheckpointConfig) else None

    def check_evaluates(self, metric: str, asked_by: str) -> None:
        """Refuse what goes by an evaluation metric, where there is no such metric.

        Args:
            metric: its name.
            asked_by: the field that goes by it.

        Raises:
            ConfigError: nothing is evaluated, or no metric has this name.
        """
        known = [LOSS, *(self.metrics or {})]
        if self.eval_data is None:
            raise ConfigError(
                f"{asked_by} goes by the evaluation metric '{metric}', and nothing is evaluated. "
                f"Pass eval_data, or leave {asked_by} out."
            )
        if metric not in known:
            raise ConfigError(
                f"{asked_by} goes by '{metric}', which is no evaluation metric."
                f"{did_you_mean(metric, known)} Known: {', '.join(known)}."
            )
