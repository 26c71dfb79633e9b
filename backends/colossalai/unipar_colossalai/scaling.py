"""Loss scaling and norms where ranks hold parts of the gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from unipar.engine import PrecisionPolicy
from unipar.strategy import EngineSpec
from unipar.world import World


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


def part_precision(spec: EngineSpec, world: World, *, autocast: bool = True) -> PrecisionPolicy:
    """Of ranks that hold parts of a gradient, one of which may overflow alone.

    Args:
        spec: what the run asks for.
        world: the joined processes.
        autocast: whether half precision is autocast's.
    """
    scaler = None
    if spec.precision == "fp16":
        scaler = PartScaler(world.device.type, process_group=None)
    return PrecisionPolicy(spec.precision, world.device, autocast=autocast, scaler=scaler)


def total_norm_of_parts(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """2-norm of the whole gradient, of which each rank holds another part. Collective."""
    squared = nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(squared)
    return squared.sqrt()
