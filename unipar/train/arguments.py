"""The objects that a call of ``fit`` is given, checked before any process starts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from unipar.callbacks import Callback
from unipar.errors import ConfigError
from unipar.evaluation.evaluate import AccumulatingMetric
from unipar.optimizers.factories import check_factories
from unipar.optimizers.named import LOSS
from unipar.train.job import Job
from unipar.utils.functions import check_function, described


def check_objects(job: Job) -> None:
    """Refuse what is not what its argument takes.

    Raises:
        ConfigError: a callback, metric or function is something else.
    """
    if not isinstance(job.callbacks, (list, tuple)):
        raise ConfigError(
            f"callbacks is a {type(job.callbacks).__name__}. Pass a list: callbacks=[…]."
        )
    for number, callback in enumerate(job.callbacks):
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks[{number}] is {described(callback)}. Pass an instance of a subclass "
                "of unipar.Callback."
            )
    _check_metrics(job.metrics)
    check_factories(job.optimizer, job.lr_scheduler)
    if job.loss is not None:
        check_function(job.loss, "loss", ("model", "batch"))
    if job.predict is not None:
        check_function(job.predict, "predict", ("model", "batch"))


def _check_metrics(metrics: Any) -> None:
    if metrics is None:
        return
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics is {described(metrics)}. Pass a mapping of names: metrics={{'accuracy': …}}."
        )
    for name, metric in metrics.items():
        if name == LOSS:
            raise ConfigError(f"metrics: '{LOSS}' is the evaluation loss; choose another name.")
        is_class = inspect.isclass(metric)
        if is_class or not (callable(metric) or isinstance(metric, AccumulatingMetric)):
            raise ConfigError(
                f"metrics['{name}'] is {described(metric)}. Pass a function of (predictions, "
                "targets), or an instance of a torchmetrics class."
            )
