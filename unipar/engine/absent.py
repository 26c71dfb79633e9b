"""The stand-in in ``parameter.grad`` where a framework keeps gradients elsewhere.

With ``None`` there, a loop that clips or scales gradients by hand would do nothing, and not know.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from unipar.errors import ConfigError

_HARMLESS = {
    *("device", "dtype", "grad", "grad_fn", "is_leaf", "is_sparse", "layout", "ndim", "shape"),
    # What looks at all tensors of a process to tell how large they are.
    *("element_size", "is_cpu", "is_cuda", "is_meta", "nelement", "numel", "untyped_storage"),
}


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # One for all, since each would be filled by a kernel of its own in every backward pass.
    return torch.zeros((), dtype=dtype, device=device)


class AbsentGradient(torch.Tensor):
    """Takes no memory, and refuses to be computed with."""

    @staticmethod
    def of(parameter: nn.Parameter) -> AbsentGradient:
        """One that fits into ``parameter.grad``."""
        nothing = _nothing(parameter.dtype, parameter.device)
        return nothing.expand(parameter.shape).as_subclass(AbsentGradient)

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentGradient:
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # A property's getter is told by what it is the getter of.
        name = getattr(getattr(func, "__self__", None), "__name__", "") or func.__name__
        if name in _HARMLESS:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise ConfigError(
            "parameter.grad was used between engine.backward(loss) and engine.step(), and under "
            "this strategy gradients are not there: each rank keeps a share of them elsewhere, or "
            "the ranks have not summed them yet. Clip with prepare(…, max_grad_norm=…), or by "
            "accelerator.clip_grad_norm_, and scale the loss instead of its gradient."
        )
