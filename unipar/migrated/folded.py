"""Functions for scripts whose loop was folded into ``unipar.fit``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from unipar import launch
from unipar.compat.runconfig import file_beside_script, read_settings
from unipar.config import RunConfig
from unipar.errors import ConfigError


def config() -> RunConfig:
    """Read ``unipar.yaml`` beside the script, and variables such as ``UNIPAR_STRATEGY``.

    In a notebook, the file in the current directory.

    Raises:
        ConfigError: every wrong key and value, with its place.
    """
    return read_settings(RunConfig, file_beside_script())


def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    """``torch.save`` in the first of the processes that a launcher has started.

    Raises:
        ConfigError: a strategy has left only a part of a model here.
    """
    if _writes(obj.values() if isinstance(obj, Mapping) else ()):
        torch.save(obj, f, *args, **kwargs)


def save_pretrained(model: Any, *args: Any, **kwargs: Any) -> None:
    """A model's ``save_pretrained``, likewise.

    Raises:
        ConfigError: as for :func:`save`.
    """
    if _writes(model.parameters()):
        model.save_pretrained(*args, **kwargs)


def _writes(parts: Iterable[Any]) -> bool:
    """Return whether this is the first process; all of them are told if what there is are parts."""
    if any(isinstance(one, DTensor) for one in parts):
        raise ConfigError(
            "the strategy divides the model among ranks, so its state dict here is only a part. "
            "Load the run's checkpoint instead (checkpoint in unipar.yaml; fit(...).checkpoint)."
        )
    place = launch.detect()
    return place is None or place.rank == 0
