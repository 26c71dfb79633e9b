"""How large a model is, before there are any processes: what ``strategy="auto"`` goes by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from unipar import registry
from unipar.checks import CheckedModel, check_model
from unipar.devices import device_memory
from unipar.errors import ConfigError
from unipar.strategy import ModelFactory, Needs, Strategy, StrategyOptions
from unipar.world import Placement

_BYTES = 16
"""Of a parameter: weight, gradient and AdamW's two moments, each in fp32."""


def resolve_for(
    strategy: str | Mapping[str, Any] | StrategyOptions,
    placement: Placement,
    models: tuple[nn.Module | ModelFactory, ...],
) -> Strategy:
    """Make the strategy that was asked for; ``"auto"`` chooses by the size of the models.

    Args:
        strategy: as :func:`unipar.registry.resolve` takes it.
        placement: ``size`` and ``device_type`` of the run.
        models: what will be trained; a function is called on the meta device, and only where its
            size can matter.

    Raises:
        ConfigError: there is no such strategy or option, or ``"auto"`` cannot tell which suits.
    """
    if not registry.is_auto(strategy):
        return registry.resolve(strategy)
    size = None
    if placement.size > 1:
        # On one device there is no choice that a size would decide.
        if not models:
            raise ConfigError(
                "strategy 'auto' goes by the size of the model, which a session does not know "
                "before its processes have joined. Name a strategy, such as "
                "Session(strategy='ddp'), or say what will be prepared: Session(model=model)."
            )
        size = _BYTES * sum(map(_num_parameters, models))
    memory = device_memory(placement.device_type)
    return registry.resolve(strategy, Needs(placement.size, size, memory))


def _num_parameters(model: nn.Module | ModelFactory) -> int:
    check_model(model)
    module = model if isinstance(model, nn.Module) else _without_storage(model)
    return sum(parameter.numel() for parameter in module.parameters())


def _without_storage(function: ModelFactory) -> nn.Module:
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return CheckedModel(function)()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            "strategy 'auto' goes by the size of the model, and the model function cannot run on "
            f"the meta device, where it would cost nothing ({type(error).__name__}: {error}). Name "
            "a strategy, such as strategy='ddp', or build the module and pass that."
        ) from error
