"""Batch norms of a model of which each rank computes a part of the batch: over that of all ranks.

``torch.nn.SyncBatchNorm`` has no kernel for CPUs, and is another class, which scripts would see.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from unipar.compat.dividing.relations import not_noted
from unipar.compat.dividing.shares import sum_over

OVER = "_unipar_over"
"""Set on a module to its own identity, which no copy of it has. Compilers see it change."""
ALONE = "alone"
"""In the place of a group: over this rank's part, as if it were all."""
_own_forward: Any = _BatchNorm.forward
_groups: list[Any] = [None]
_computes = False
"""Whether a model computes; a script that calls a layer of it has the whole batch."""
_over: Any = None
"""What :func:`normalize_over` was told last."""
_passes: deque[tuple[int, int, Any]] = deque(maxlen=10_000)
"""Of passes, between which numbers the nodes of their graphs are, and the groups; new ones first.

By these, what a backward pass computes once more, as checkpoints do, is computed as it was.
"""


def normalize_over(group: Any, module: nn.Module) -> None:
    """Compute the statistics in a module over a group from now on; over no other for ``None``."""
    global _over
    # torch 2.13, torch/nn/modules/batchnorm.py. The class itself, for copies and files of modules
    # are to have nothing of this.
    _BatchNorm.forward = _forward
    _over = group
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
    begin, group = _next_number(), _over
    try:
        yield
    finally:
        _computes = before
        _passes.appendleft((begin, _next_number(), group))


def is_batch_norm(module: nn.Module) -> TypeGuard[Any]:
    """Whether this is one, of whatever dimensions."""
    return isinstance(module, _BatchNorm)


def has_batch_norms(module: nn.Module) -> bool:
    """Whether there are any in a module that computes statistics of a batch."""
    return any(is_batch_norm(one) and one.training for one in module.modules())


@not_noted
def _forward(self: Any, input: torch.Tensor) -> torch.Tensor:
    group = _groups[0] if getattr(self, OVER, None) == id(self) else None
    if not _computes:
        group = _group_of_pass(group) if hasattr(self, OVER) and _computes_again() else None
    if group is None or not (self.training or self.running_mean is None):
        return _own_forward(self, input)
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


def _next_number() -> int:
    """That of the next node of a graph. torch 2.8 to 2.13, csrc/autograd/init.cpp."""
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]


def _group_of_pass(latest: Any) -> Any:
    """The group of the pass that is computed again; that of the latest, if it cannot be told."""
    node: Any = torch._C._current_autograd_node()
    number = -1 if node is None else node._sequence_nr()
    return next((group for begin, end, group in _passes if begin <= number < end), latest)


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
