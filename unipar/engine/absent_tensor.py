"""The stand-in for a parameter or buffer whose values this rank does not have at the moment.

What is there in its place, nothing or a part, would make a penalty over all weights one over some.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from unipar.engine.absent import HARMLESS, asked_for
from unipar.errors import ConfigError

_HARMLESS = HARMLESS | {
    *("__len__", "dim", "get_device", "is_complex", "is_floating_point", "is_nested"),
    *("is_quantized", "itemsize", "nbytes", "requires_grad", "size"),
}
_ITSELF = {"data", "detach"}
"""What gives another tensor of the same values, which are not there either."""


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    inexact = dtype.is_floating_point or dtype.is_complex
    return torch.full((), math.nan if inexact else 0, dtype=dtype, device=device)


class AbsentTensor(torch.Tensor):
    """Takes no memory, says what it is, and is not computed with."""

    name_in_model: str
    _refusal: Callable[[str], str]
    _is_param: bool
    """By which torch knows a parameter of another class (torch 2.13, nn/parameter.py)."""

    @staticmethod
    def of(
        name: str,
        value: torch.Tensor,
        refusal: Callable[[str], str],
        *,
        shape: Sequence[int],
        device: torch.device,
    ) -> AbsentTensor:
        """One in the place of a parameter or buffer.

        Args:
            name: in the model.
            value: what it stands in for.
            refusal: why it is not computed with, given what it is called.
            shape: of the whole tensor.
            device: where it would be.
        """
        with torch._C.DisableTorchFunctionSubclass():
            absent = _nothing(value.dtype, device).expand(shape).as_subclass(AbsentTensor)
            absent.name_in_model, absent._refusal = name, refusal
            absent._is_param = isinstance(value, nn.Parameter)
            absent.requires_grad_(value.requires_grad)
            return absent

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = asked_for(func)
        # One that is set would be set on this rank alone, where no gradient comes.
        if func.__name__ != "__set__" or name == "grad":
            if name in _HARMLESS:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            if name in _ITSELF:
                return args[0]
        leaves = tree_leaves((args, kwargs))
        absent = next(leaf for leaf in leaves if isinstance(leaf, AbsentTensor))
        raise ConfigError(absent._refusal(f"'{absent.name_in_model}'"))
