"""Batch norms of a model of which each rank computes a part of the batch: over that of all ranks.

``torch.nn.SyncBatchNorm`` has no kernel for CPUs, and is another class, which scripts would see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from unipar.compat.dividing.shares import sum_over

OVER = "_unipar_over"
"""Set on a module to its own identity, which no copy of it has. Compilers see it change."""
ALONE = "alone"
"""In the place of a group: over this rank's part, as if it were all."""
_own_forward: Any = _BatchNorm.forward
_groups: list[Any] = [None]
_computes = False
"""Whether a model computes a part; a script that calls a layer of it has the whole batch."""


def normalize_over(group: Any, module: nn.Module) -> None:
    """Compute the statistics in a module over a group from now on; over no other for ``None``.

    What a backward pass computes once more, as checkpoints do, needs them as they were, so they
    stay until told otherwise.
    """
    # torch 2.13, torch/nn/modules/batchnorm.py. The class itself, for copies and files of modules
    # are to have nothing of this.
    _BatchNorm.forward = _forward
    if group is not None:
        _groups[0] = group
    for one in module.modules():
        if isinstance(one, _BatchNorm):
            one.__dict__[OVER] = None if group is None else id(one)


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """Around a forward pass, in which what :func:`normalize_over` has said holds."""
    global _computes
    before, _computes = _computes, True
    try:
        yield
    finally:
        _computes = before


def is_batch_norm(module: nn.Module) -> TypeGuard[Any]:
    """Whether this is one, of whatever dimensions."""
    return isinstance(module, _BatchNorm)


def has_batch_norms(module: nn.Module) -> bool:
    """Whether there are any in a module that computes statistics of a batch."""
    return any(is_batch_norm(one) and one.training for one in module.modules())


def _forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    over = getattr(self, OVER, None) == id(self) and (_computes or _computes_again())
    if not over or not (self.training or self.running_mean is None):
        return _own_forward(self, input)
    group = _groups[0]
    self._check_input_dim(input)
    along = [dim for dim in range(input.dim()) if dim != 1]
    shape = [1, -1, *[1] * (input.dim() - 2)]
    # In fp32, as torch's kernels.
    wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    count = wide.new_full((1,), wide.numel() / wide.shape[1])
    sums = _summed(torch.cat([wide.sum(along), count]), group)
    total = sums[-1].detach()
    mean = sums[:-1] / total
    centered = wide - mean.view(shape)
    variance = _summed(centered.square().sum(along), group) / total
    if self.training and self.running_mean is not None:
        _keep(self, mean.detach(), variance.detach() * total / (total - 1))
    found = centered * torch.rsqrt(variance + self.eps).view(shape)
    if self.weight is not None:
        found = found * self.weight.view(shape)
    if self.bias is not None:
        found = found + self.bias.view(shape)
    return found.to(input.dtype)


def _computes_again() -> bool:
    """Whether a backward pass is under way, in whatever thread. torch 2.8 to 2.13."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportAttributeAccessIssue]


def _summed(values: torch.Tensor, group: Any) -> torch.Tensor:
    return values if group == ALONE else sum_over(values, group)


def _keep(module: Any, mean: torch.Tensor, variance: torch.Tensor) -> None:
    with torch.no_grad():
        module.num_batches_tracked += 1
        by: Any = module.momentum
        if by is None:
            by = 1 / module.num_batches_tracked.to(mean.dtype)
        module.running_mean.lerp_(mean.to(module.running_mean.dtype), by)
        module.running_var.lerp_(variance.to(module.running_var.dtype), by)
