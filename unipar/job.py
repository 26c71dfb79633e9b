"""What a run needs besides its config: the user's own objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from unipar.callbacks import Callback, Logger
from unipar.config import RunConfig
from unipar.evaluate import Metric, Predict
from unipar.loss import LossFn
from unipar.strategy import ModelFactory, OptimizerFactory, SchedulerFactory


@dataclass
class Job:
    """One call of ``fit``, as every process of the run gets it.

    Attributes:
        config: the resolved config.
        output_dir: where the run's files go.
        checkpoint_dir: where checkpoints go; ``None`` writes none.
        weights_dir: where to leave the final weights when no checkpoint holds them.
    """

    model: nn.Module | ModelFactory
    data: Any
    config: RunConfig
    output_dir: Path
    checkpoint_dir: Path | None
    optimizer: OptimizerFactory
    loss: LossFn
    lr_scheduler: SchedulerFactory | None = None
    eval_data: Any = None
    metrics: Mapping[str, Metric] | None = None
    predict: Predict | None = None
    callbacks: Sequence[Callback] = ()
    loggers: Sequence[str | Logger] = ()
    weights_dir: Path | None = None
