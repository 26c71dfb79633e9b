"""Figures that a script reads on the host, where each rank has a part of every batch.

What a script decides by a loss, as to stop or to leave a step out, all ranks must decide alike: so
a loss is read as that of the whole batch. What has no graph, as a count of correct predictions,
does not tell what it is of; that is said once, with the line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_UNIPAR = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_TENSOR = str(Path(_TORCH) / "_tensor.py")
_READS = ("item", "__float__", "__int__", "__bool__", "tolist", "detach", "__lt__", "__le__",
          "__gt__", "__ge__", "isnan", "isfinite", "isinf", "numpy")  # fmt: skip
_LEAVE_DEVICE = ("item", "__float__", "__int__", "__bool__", "tolist", "numpy")
_own = {name: getattr(torch.Tensor, name) for name in _READS}


def install(read: Callable[[torch.Tensor, bool], torch.Tensor]) -> None:
    """See what is read of tensors, until :func:`remove`.

    Args:
        read: gives what to read of one; called with whether it leaves the device.
    """
    for name in _READS:
        setattr(torch.Tensor, name, _reading(name, read))


def remove() -> None:
    """Leave tensors to torch."""
    for name, own in _own.items():
        setattr(torch.Tensor, name, own)


def _reading(name: str, read: Callable[[torch.Tensor, bool], torch.Tensor]) -> Any:
    own, leaves = _own[name], name in _LEAVE_DEVICE

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(read(self, leaves), *args, **kwargs)

    method.__name__, method.__doc__ = name, own.__doc__
    return method


def line(*, through_torch: bool = False) -> str:
    """The line that reads, if it is none of torch's own.

    Args:
        through_torch: whether what torch does there is what a line of the script has it do.
    """
    frame: Any = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        # Formatting a tensor reads it there.
        if not file.startswith(_UNIPAR) and file != _TENSOR:
            if not file.startswith(_TORCH):
                return f"{Path(file).name}:{frame.f_lineno}"
            if not through_torch:
                return ""
        frame = frame.f_back
    return ""
