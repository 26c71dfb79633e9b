"""Outputs of a model under mixed precision, converted to fp32."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch


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
