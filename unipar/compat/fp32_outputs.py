"""What models are given and give under mixed precision, converted to other precisions."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from unipar.data.move import with_items


def fp32(value: Any) -> Any:
    """The value with every half-precision tensor in it in fp32; a mutable mapping is changed."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    if isinstance(value, MutableMapping):  # The outputs of models of transformers, too.
        for key in list(value):
            value[key] = fp32(value[key])
        return value
    return with_items(value, fp32)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """The value with every floating-point tensor in it in a dtype; in dataclasses, too."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    return with_items(value, lambda one: cast(one, dtype))
