"""Some samples of a batch, in any order."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unipar.data.move import with_items


def picked(data: Any, num_samples: int, places: Sequence[int]) -> Any:
    """Return a batch of the samples that are in some places of another.

    Args:
        data: a batch: tensors that have samples along their first dim, lists of samples, and
            containers of these; anything else stays as it is.
        num_samples: how many samples there are.
        places: of the samples to return, in their new order.

    Raises:
        ValueError: a tensor in it has another first dim, or nobody knows what an object in it
            holds; the message names it.
    """

    def pick(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            if part.ndim and (part.is_nested or len(part) != num_samples):
                raise ValueError(f"a tensor of shape {tuple(part.shape)}")
            return part[list(places)] if part.ndim else part
        if not _holds(part):
            if hasattr(part, "to"):
                raise ValueError(f"a {type(part).__name__}")
            return part
        of_samples = isinstance(part, (list, tuple)) and len(part) == num_samples
        if of_samples and not hasattr(part, "_fields") and not are_columns(part):
            return type(part)([part[place] for place in places])
        return with_items(part, pick)

    def are_columns(part: Any) -> bool:
        """Whether items are of all samples, where there are as many as samples."""
        try:
            for one in part:
                pick(one)
        except ValueError:
            return False
        return any(isinstance(one, torch.Tensor) or _holds(one) for one in part)

    return pick(data)


def _holds(part: Any) -> bool:
    is_instance = dataclasses.is_dataclass(part) and not isinstance(part, type)
    return is_instance or isinstance(part, (list, tuple, Mapping))
