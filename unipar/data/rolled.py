"""A batch with its samples in another order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from unipar.data.move import with_items


def rolled(data: Any, num_samples: int) -> Any:
    """Return ``data`` with each sample in the place of the next one, the last in the first's.

    Args:
        data: a batch: tensors that have samples along their first dim, lists of samples, and
            containers of these; anything else stays as it is.
        num_samples: how many samples there are.

    Raises:
        ValueError: a tensor in it has another first dim, or nobody knows what an object in it
            holds; the message names it.
    """

    def roll(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            if part.ndim and (part.is_nested or len(part) != num_samples):
                raise ValueError(f"a tensor of shape {tuple(part.shape)}")
            return part.roll(1, 0) if part.ndim else part
        if not _holds(part):
            if hasattr(part, "to"):
                raise ValueError(f"a {type(part).__name__}")
            return part
        of_samples = isinstance(part, (list, tuple)) and len(part) == num_samples
        if of_samples and not hasattr(part, "_fields") and not are_columns(part):
            return type(part)([*part[-1:], *part[:-1]])
        return with_items(part, roll)

    def are_columns(part: Any) -> bool:
        """Whether items are of all samples, where there are as many as samples."""
        try:
            for one in part:
                roll(one)
        except ValueError:
            return False
        return any(isinstance(one, torch.Tensor) or _holds(one) for one in part)

    return roll(data)


def _holds(part: Any) -> bool:
    is_instance = dataclasses.is_dataclass(part) and not isinstance(part, type)
    return is_instance or isinstance(part, (list, tuple, Mapping))
