"""Loss scaling where ranks hold parts of the gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


class PartScaler(ShardedGradScaler):
    """Counts a rank that holds no gradient as one whose gradients are finite."""

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool = True,
    ) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        return found or {found_inf.device: torch.zeros_like(found_inf)}


def clip_parts(parts: Sequence[torch.Tensor], max_norm: float) -> float:
    """Clip a gradient of which each rank holds another part; the whole one's norm before."""
    grads = [p.grad for p in parts if p.grad is not None]
    squared = nn.utils.get_total_norm(grads).square()
    dist.all_reduce(squared)
    norm = squared.sqrt()
    if not math.isinf(max_norm):
        nn.utils.clip_grads_with_norm_(parts, max_norm, norm)
    return norm.item()
