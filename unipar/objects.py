"""The objects that a call of ``fit`` is given, checked before any process starts."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from unipar.callbacks import Callback
from unipar.errors import ConfigError
from unipar.evaluate import AccumulatingMetric
from unipar.job import Job
from unipar.optim import LOSS


def check_objects(job: Job) -> None:
    """Refuse what is not what its argument takes.

    Raises:
        ConfigError: a callback, metric, loss or predict function is something else.
    """
    if not isinstance(job.callbacks, (list, tuple)):
        raise ConfigError(f"callbacks is a {_kind(job.callbacks)}. Pass a list: callbacks=[…].")
    for number, callback in enumerate(job.callbacks):
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks[{number}] is {_described(callback)}. Pass an instance of a subclass "
                "of unipar.Callback."
            )
    _check_metrics(job.metrics)
    if job.loss is not None:
        check_function(job.loss, "loss", ("model", "batch"))
    if job.predict is not None:
        check_function(job.predict, "predict", ("model", "batch"))


def check_function(given: Any, name: str, parameters: tuple[str, ...]) -> None:
    """Refuse what cannot be called with these arguments, by their places."""
    wanted = f"{name}({', '.join(parameters)})"
    if not callable(given) or isinstance(given, nn.Module):
        also = ""
        if isinstance(given, nn.Module):
            also = (
                " It is called with the model, which it calls: model(batch[0])."
                if "model" in parameters
                else " It gets the whole batch, and may call a module: module(output, batch[1])."
            )
        raise ConfigError(f"{name} is {_described(given)}. Pass a function {wanted}.{also}")
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):  # Some built-in functions have none.
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        raise ConfigError(
            f"{name} is {_described(given)} of {signature}, and is called as {wanted}: {error}."
        ) from error


def _check_metrics(metrics: Any) -> None:
    if metrics is None:
        return
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics is a {_kind(metrics)}. Pass a mapping of names: metrics={{'accuracy': …}}."
        )
    for name, metric in metrics.items():
        if name == LOSS:
            raise ConfigError(f"metrics: '{LOSS}' is the evaluation loss; choose another name.")
        is_class = inspect.isclass(metric)
        if is_class or not (callable(metric) or isinstance(metric, AccumulatingMetric)):
            raise ConfigError(
                f"metrics['{name}'] is {_described(metric)}. Pass a function of (predictions, "
                "targets), or an instance of a torchmetrics class."
            )


def _described(given: Any) -> str:
    if inspect.isclass(given):
        return f"the class {given.__name__}"
    return "a function" if inspect.isroutine(given) else f"a {_kind(given)}"


def _kind(given: Any) -> str:
    return type(given).__name__
