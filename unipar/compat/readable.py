"""Plain values and tensors, nested: what checkpoints are read with, which run no code of a file."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.utils import _pytree

from unipar.errors import ConfigError


def check_readable(value: Any, what: str) -> None:
    """Refuse what could be written, and not read again.

    Args:
        value: what is to be written.
        what: the call, and what of it this is.

    Raises:
        ConfigError: it holds other objects than plain values and tensors.
    """
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    try:
        torch.load(file, weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"{what} holds objects that a checkpoint is not read with. Give plain values and "
            "tensors, as vars(args) instead of args, and tolist() of an array."
        ) from error


def are_equal(one: Any, other: Any) -> bool:
    """Whether values are nested alike, and are equal; tensors may be on other devices."""
    # Not public in torch 2.13 (torch/utils/_pytree.py).
    (left, made), (right, other_made) = _pytree.tree_flatten(one), _pytree.tree_flatten(other)
    return made == other_made and all(
        isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b.to(a.device))
        if isinstance(a, torch.Tensor)
        else type(a) is type(b) and bool(a == b)
        for a, b in zip(left, right, strict=True)
    )
