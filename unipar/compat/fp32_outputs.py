"""Outputs of a model under mixed precision, converted to fp32."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch


class Widened:
    """A callable whose tensors come out in fp32, in whatever they are.

    Args:
        computes: what is called.
    """

    def __init__(self, computes: Callable[..., Any]) -> None:
        self._computes = computes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return fp32(self._computes(*args, **kwargs))


def fp32(value: Any) -> Any:
    """The value with every half-precision tensor in it in fp32; a mutable mapping is changed."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    if isinstance(value, MutableMapping):  # The outputs of models of transformers, too.
        for key in list(value):
            value[key] = fp32(value[key])
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(fp32, value))
    return type(value)(map(fp32, value)) if isinstance(value, (list, tuple)) else value
