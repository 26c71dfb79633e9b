"""Optimizers that make a step in one kernel, unless the user says otherwise.

PyTorch's own default on GPUs is ``foreach``: one kernel for each operation of the update. A fused
one reads and writes each tensor once; its sums round differently, within what fp32 rounds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from unipar.state import is_dtensor

DEVICE_TYPES = frozenset({"cuda"})
"""Where fused optimizers are a default."""

_sparse: ContextVar[frozenset[int] | None] = ContextVar("sparse", default=None)


@contextlib.contextmanager
def fused_by_default(sparse: Collection[torch.Tensor]) -> Iterator[None]:
    """Let optimizers that are built by name in this block be fused ones where that is possible.

    Args:
        sparse: the parameters whose gradients are sparse, which no fused optimizer takes.
    """
    token = _sparse.set(frozenset(map(id, sparse)))
    try:
        yield
    finally:
        _sparse.reset(token)


def is_fused(name: str, options: Mapping[str, Any], parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether an optimizer that is built by name is to be fused.

    That of ``adam``, ``adamw`` and ``sgd`` is, inside of :func:`fused_by_default`, if the user has
    chosen no implementation and every parameter is one of floating-point numbers on a CUDA device
    with dense gradients; and, if they are DTensors, where PyTorch has a rule for it. ``sgd`` with a
    momentum is not.

    Args:
        name: lower-cased.
        options: what the user gives the optimizer.
        parameters: those that it trains.
    """
    sparse = _sparse.get()
    chosen = any(options.get(key) is not None for key in ("fused", "foreach"))
    if sparse is None or chosen or options.get("differentiable"):
        return False
    # torch 2.13, optim/sgd.py, `_fused_sgd`: it fails where a parameter has its first gradient in a
    # later step than others (unused ones, and those that are thawed).
    if options.get("momentum"):
        return False
    divided = {is_dtensor(parameter) for parameter in parameters}
    # torch 2.13, distributed/tensor/_ops/_pointwise_ops.py, and 2.8 to 2.15: there are rules for
    # Adam's kernels and for none of SGD's, and none for DTensors among plain tensors.
    able = {"adam", "adamw"} if divided == {True} else {"adam", "adamw", "sgd"}
    return (
        name in able
        and len(divided) == 1
        and all(p.device.type in DEVICE_TYPES and p.is_floating_point() for p in parameters)
        and not any(id(parameter) in sparse for parameter in parameters)
    )
