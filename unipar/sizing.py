"""``strategy="auto"``: strategies bid for a run by its devices and the size of its models."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from unipar.engine.checks import CheckedModel, check_model
from unipar.errors import ConfigError
from unipar.strategy import ModelFactory, Strategy, StrategyOptions, registry
from unipar.utils.devices import device_memory
from unipar.utils.torch_versions import meta_device
from unipar.world import Placement

_log = logging.getLogger(__name__)

_BYTES = 16
"""Of a parameter: weight, gradient and AdamW's two moments, each in fp32."""


class Needs(NamedTuple):
    """The facts of a run that ``strategy="auto"`` goes by.

    Attributes:
        devices: number of processes.
        model_bytes: parameters, gradients and optimizer state of one replica, in bytes, under
            AdamW; ``None`` when the model is not known yet.
        device_bytes: memory of one device, in bytes.
    """

    devices: int
    model_bytes: int | None
    device_bytes: int

    @property
    def fits(self) -> bool:
        """Whether a replica leaves two fifths of a device to activations and buffers."""
        return self.model_bytes is None or self.model_bytes < 0.6 * self.device_bytes


@runtime_checkable
class Bidder(Protocol):
    """A strategy class that ``strategy="auto"`` may choose."""

    @classmethod
    def bid(cls, needs: Needs) -> float:
        """How well the strategy suits a run; the highest bid wins, and 0 is not at all."""
        ...


def resolve_for(
    strategy: str | Mapping[str, Any] | StrategyOptions,
    placement: Placement,
    models: tuple[nn.Module | ModelFactory, ...],
) -> Strategy:
    """Make the strategy that was asked for; ``"auto"`` chooses by the size of the models.

    Args:
        strategy: as :func:`unipar.strategy.registry.resolve` takes it.
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
    return choose(Needs(placement.size, size, memory))


def choose(needs: Needs) -> Strategy:
    """Make the strategy that bids most of those that can run here; of equals the first by name.

    Raises:
        ConfigError: none bids.
    """
    bids: list[tuple[float, str]] = []
    refused: list[str] = []
    for name in registry.names():
        try:
            found = registry.strategy_class(name)
            available = found.availability()
        except ConfigError as error:
            refused.append(str(error))
            continue
        if not available.ok:
            refused.append(f"{name}: {available.reason} {available.remedy}".rstrip())
        elif issubclass(found, Bidder) and (bid := found.bid(needs)) > 0:
            bids.append((bid, name))
        else:
            refused.append(f"{name}: not offered for {needs.devices} device(s).")
    if not bids:
        reasons = "\n".join(f"  - {reason}" for reason in refused) or "  none is installed."
        raise ConfigError(f"strategy 'auto' found none for this run; name one.\n{reasons}")
    bid, name = min(bids, key=lambda entry: (-entry[0], entry[1]))
    _log.info("strategy 'auto' chose '%s' (bid %g). Not chosen: %s", name, bid, "; ".join(refused))
    return registry.make(name, {})


def _num_parameters(model: nn.Module | ModelFactory) -> int:
    check_model(model)
    module = model if isinstance(model, nn.Module) else _without_storage(model)
    return sum(parameter.numel() for parameter in module.parameters())


def _without_storage(function: ModelFactory) -> nn.Module:
    try:
        with torch.random.fork_rng(devices=[]), meta_device():
            return CheckedModel(function)()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            "strategy 'auto' goes by the size of the model, and the model function cannot run on "
            f"the meta device, where it would cost nothing ({type(error).__name__}: {error}). Name "
            "a strategy, such as strategy='ddp', or build the module and pass that."
        ) from error
