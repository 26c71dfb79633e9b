"""Exchange between ranks in scripts of Fabric's style."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from unipar.errors import ConfigError
from unipar.world import World


def all_gather(data: Any, world: World) -> Any:
    """Every rank's tensors, behind a new first dimension of ranks; as they are on one rank.

    Args:
        data: tensors and numbers, in collections of any depth; of the same shapes on all ranks.
        world: the joined processes.
    """

    def one(value: Any) -> Any:
        tensor = _tensor(value, world)
        if world.size == 1 or not isinstance(tensor, torch.Tensor):
            return tensor
        own = tensor.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(world.size)]
        dist.all_gather(parts, own)
        return torch.stack(parts)

    return tree_map(one, data)


def all_reduce(data: Any, op: str, world: World) -> Any:
    """Mean or sum of tensors over ranks, put into them; numbers become tensors.

    Raises:
        ConfigError: it is to be made otherwise.
    """
    if op not in ("mean", "avg", "sum"):
        raise ConfigError(f"reduce_op={op!r} is not known here. Use 'mean' or 'sum'.")

    def one(value: Any) -> Any:
        tensor = _tensor(value, world)
        if world.size == 1 or not isinstance(tensor, torch.Tensor):
            return tensor
        dist.all_reduce(tensor)
        if op == "sum":
            return tensor
        return tensor.div_(world.size) if tensor.is_floating_point() else tensor / world.size

    return tree_map(one, data)


def _tensor(value: Any, world: World) -> Any:
    if isinstance(value, (bool, int, float)):
        return torch.tensor(value, device=world.device)
    return value.to(world.device) if isinstance(value, torch.Tensor) else value
