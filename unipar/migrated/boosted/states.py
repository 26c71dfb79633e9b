"""Files of weights, optimizers and schedulers, by the names that a ``Booster`` has for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unipar.errors import ConfigError
from unipar.migrated import script


def save_model(model: nn.Module, checkpoint: str | Path) -> None:
    """Write weights, at full shapes, into one file of ``torch.save``. Collective."""
    _save(script.gathered(model).state_dict(), checkpoint)


def load_model(model: nn.Module, checkpoint: str | Path) -> None:
    """Take over the weights of a file. Collective.

    Raises:
        ConfigError: it is a directory of shards.
    """
    script.gathered(model).load_state_dict(_load(checkpoint))


def save_optimizer(optimizer: Optimizer, checkpoint: str | Path) -> None:
    """Write an optimizer's state, by the names of parameters, into one file. Collective."""
    _save(script.gathered(optimizer).state_dict(), checkpoint)


def load_optimizer(optimizer: Optimizer, checkpoint: str | Path) -> None:
    """Take over what :func:`save_optimizer` has written. Collective.

    Raises:
        ConfigError: it is a directory of shards, or by the numbers of parameters.
    """
    script.gathered(optimizer).load_state_dict(_load(checkpoint))


def save_lr_scheduler(lr_scheduler: Any, checkpoint: str | Path) -> None:
    """Write a scheduler's state into one file. Collective."""
    _save(lr_scheduler.state_dict(), checkpoint)


def load_lr_scheduler(lr_scheduler: Any, checkpoint: str | Path) -> None:
    """Take over what :func:`save_lr_scheduler` has written."""
    lr_scheduler.load_state_dict(_load(checkpoint))


def _save(state: Any, checkpoint: str | Path) -> None:
    ranks = script.world()
    if ranks.is_main:
        Path(checkpoint).parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, checkpoint)
    ranks.barrier()


def _load(checkpoint: str | Path) -> Any:
    if Path(checkpoint).is_dir():
        raise ConfigError(
            f"{checkpoint} is a directory, as shard=True makes it. Save it again with shard=False, "
            "and load that file."
        )
    return torch.load(checkpoint, map_location="cpu", weights_only=True)
