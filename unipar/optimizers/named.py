"""Optimizers and schedulers of torch by name: what ``optimizer="adamw"`` means."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler

from unipar.errors import ConfigError, did_you_mean
from unipar.optimizers.fused import is_fused

_NEED_CALLS = {
    "lbfgs": "it evaluates the model several times a step",
    "lambdalr": "it is made from a function",
    "multiplicativelr": "it is made from a function",
    "sequentiallr": "it is made from other schedulers",
    "chainedscheduler": "it is made from other schedulers",
}


LOSS = "loss"
"""What an evaluation calls its mean loss."""

_PLATEAU = "reducelronplateau"


def _classes(module: Any, base: type) -> dict[str, type]:
    return {
        name.lower(): found
        for name, found in vars(module).items()
        if inspect.isclass(found) and issubclass(found, base) and found is not base
        if not name.startswith("_") and name.lower() not in _NEED_CALLS
    }


OPTIMIZERS: Mapping[str, type] = _classes(torch.optim, Optimizer)
"""The optimizers of ``torch.optim`` that a plain step can drive, by lower-cased name."""

SCHEDULERS: Mapping[str, type] = _classes(lr_scheduler, lr_scheduler.LRScheduler)
"""The schedulers of ``torch.optim.lr_scheduler`` made from plain values, by lower-cased name."""


def takes_metric(scheduler: lr_scheduler.LRScheduler | None) -> bool:
    """Return whether a scheduler is stepped with an evaluation's metric, not after each step."""
    return isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)


@dataclass(frozen=True)
class NamedOptimizer:
    """Builds an optimizer of ``torch.optim``; an :data:`unipar.strategy.OptimizerFactory`.

    Attributes:
        name: the class's name, lower-cased.
        options: its keyword arguments.

    Raises:
        ConfigError: there is no such optimizer, or it does not take these arguments.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A wrong value is found before any process starts.
        over = [nn.Parameter(torch.zeros(1, 1))] if self.options.get("fused") else _Unread()
        with contextlib.suppress(_Accepted):
            _build("optimizer", OPTIMIZERS, self.name, over, self.options)

    def __call__(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        """Build it over the parameters that require grad.

        On GPUs it may be a fused one; see :func:`unipar.optimizers.fused.is_fused`.

        Raises:
            ConfigError: none of them does, or the optimizer cannot take their shapes.
        """
        trainable = [parameter for _, parameter in named_parameters if parameter.requires_grad]
        if not trainable:
            raise ConfigError(
                "the model has no trainable parameter (requires_grad is False for all, or there "
                "is none): unfreeze what should be trained."
            )
        options = dict(self.options)
        if is_fused(self.name.lower(), options, trainable):
            options["fused"] = True
        return _build("optimizer", OPTIMIZERS, self.name, trainable, options)


@dataclass(frozen=True)
class NamedScheduler:
    """Builds a scheduler of ``torch.optim.lr_scheduler``, stepped once an optimizer step.

    ``reducelronplateau`` is stepped at evaluations instead, and takes the name of a ``metric``.

    Attributes:
        name: the class's name, lower-cased.
        options: its keyword arguments; lengths count optimizer steps, or evaluations.

    Raises:
        ConfigError: there is no such scheduler, or it does not take these arguments.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self(_Stand())
        if self.metric is not None and not isinstance(self.metric, str):
            raise ConfigError(
                f"lr_scheduler '{self.name}' has metric={self.metric!r}. Give the name of an "
                "evaluation metric, or 'loss'."
            )

    @property
    def metric(self) -> str | None:
        """The evaluation metric that it is stepped with, if it is."""
        return self.options.get("metric", LOSS) if self.name.lower() == _PLATEAU else None

    def __call__(self, optimizer: Optimizer) -> lr_scheduler.LRScheduler:
        """Build it over ``optimizer``."""
        own = ("metric",) if self.metric is not None else ()
        return _build("lr_scheduler", SCHEDULERS, self.name, optimizer, self.options, own)


class _Accepted(Exception):
    """An optimizer has taken its values."""


class _Unread:
    """Parameters for an optimizer that is not to be built, only to look at its values.

    It does that before it reads the parameters, but for what ``fused`` goes with. To build it,
    torch imports its compiler, which takes as long as to import torch; that is for the workers.
    """

    def __iter__(self) -> NoReturn:
        raise _Accepted


class _Stand(Optimizer):
    """What a scheduler needs of an optimizer to look at its own values; see :class:`_Unread`."""

    def __init__(self) -> None:
        # momentum is there because cycling schedulers want an optimizer that has one.
        self.defaults = {"lr": 0.1, "momentum": 0.9}
        self.param_groups = [dict(self.defaults)]


def _build(
    kind: str,
    classes: Mapping[str, type],
    name: str,
    over: Any,
    options: Mapping[str, Any],
    own: tuple[str, ...] = (),
) -> Any:
    """Build it; ``own`` are options of unipar's, which the class does not know."""
    found = _find(kind, classes, name, options, own)
    values = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in options.items()
        if key not in own
    }
    try:
        return found(over, **values)
    except (TypeError, ValueError, RuntimeError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in options.items())
        raise ConfigError(
            f"{kind} '{name}' does not take {given or 'these values'}: {error}."
        ) from error


def _find(
    kind: str,
    classes: Mapping[str, type],
    name: str,
    options: Mapping[str, Any],
    own: tuple[str, ...],
) -> type:
    """The class, if it takes arguments of these names."""
    found = classes.get(name.lower())
    if found is None:
        why = _NEED_CALLS.get(name.lower())
        raise ConfigError(
            f"{kind} '{name}' cannot be used by name: {why}. Pass a function that builds it."
            if why
            else f"there is no {kind} '{name}'.{did_you_mean(name.lower(), classes)} "
            f"Allowed: {', '.join(sorted(classes))}, or a function that builds one."
        )
    _, *parameters = inspect.signature(found).parameters.values()
    known = [*(parameter.name for parameter in parameters), *own]
    unknown = [key for key in options if key not in known]
    if unknown:
        raise ConfigError(
            f"{kind} '{name}' has no argument '{unknown[0]}'.{did_you_mean(unknown[0], known)} "
            f"Allowed: {', '.join(known)}."
        )
    required = [
        p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    missing = [key for key in required if key not in options]
    if missing:
        raise ConfigError(f"{kind} '{name}' needs {', '.join(missing)}.")
    return found
