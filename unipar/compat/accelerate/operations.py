"""Tensors of all ranks, in lists, tuples and mappings of any depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.distributed as dist

from unipar.errors import ConfigError
from unipar.world import World

Reduction = Literal["mean", "sum", "max", "none"]


def each_tensor(function: Callable[[torch.Tensor], torch.Tensor], data: Any) -> Any:
    """``data`` with ``function`` applied to every tensor in it.

    Raises:
        ConfigError: there is something else in it.
    """
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, Mapping):
        return type(data)({key: each_tensor(function, value) for key, value in data.items()})  # pyright: ignore[reportCallIssue]
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(each_tensor(function, value) for value in data))
    if isinstance(data, (list, tuple)):
        return type(data)(each_tensor(function, value) for value in data)
    raise ConfigError(
        f"ranks exchange tensors here, and this holds {type(data).__name__}. Give tensors, or use "
        "gather_for_metrics, which takes anything."
    )


def holds_tensors_only(data: Any) -> bool:
    """Return whether :func:`each_tensor` takes it."""
    if isinstance(data, Mapping):
        return all(map(holds_tensors_only, data.values()))
    if isinstance(data, (list, tuple)):
        return all(map(holds_tensors_only, data))
    return isinstance(data, torch.Tensor)


def gather(data: Any, world: World) -> Any:
    """Every rank's tensors, one behind the other in the first dimension. Collective.

    Shapes are the same on all ranks; a scalar counts as one element.
    """
    if world.size == 1:
        return data
    _check_replicas(world)

    def one(tensor: torch.Tensor) -> torch.Tensor:
        whole = (tensor.detach()[None] if tensor.ndim == 0 else tensor.detach()).contiguous()
        parts = [torch.empty_like(whole) for _ in range(world.size)]
        dist.all_gather(parts, whole)
        return torch.cat(parts)

    return each_tensor(one, data)


def gather_objects(data: Any, world: World) -> Any:
    """The elements of every rank's list. Collective."""
    if world.size == 1:
        return data
    _check_replicas(world)
    return [one for part in world.gather(data) for one in part]


def reduce(data: Any, world: World, reduction: Reduction = "sum") -> Any:
    """Sum, mean or maximum over ranks of each tensor. Collective."""
    _check_replicas(world)

    def one(tensor: torch.Tensor) -> torch.Tensor:
        result = tensor.clone()
        if world.size > 1 and reduction != "none":
            with torch.no_grad():
                # As in Accelerate, a gradient comes to this rank's own.
                op = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
                dist.all_reduce(result, op)
        return result / world.size if reduction == "mean" else result

    return each_tensor(one, data)


def pad(data: Any, world: World, dim: int, value: float, *, first: bool) -> Any:
    """Tensors as long in one dimension as the longest of any rank. Collective."""

    def one(tensor: torch.Tensor) -> torch.Tensor:
        if not -tensor.ndim <= dim < tensor.ndim:
            return tensor
        longest = max(world.gather(tensor.shape[dim]))
        missing = list(tensor.shape)
        missing[dim] = longest - tensor.shape[dim]
        if not missing[dim]:
            return tensor
        filler = tensor.new_full(missing, value)
        return torch.cat((filler, tensor) if first else (tensor, filler), dim)

    return each_tensor(one, data)


def _check_replicas(world: World) -> None:
    if world.data_size != world.size:
        raise ConfigError(
            f"{world.size} ranks hold {world.data_size} replicas, so samples would be gathered "
            "several times. Use a strategy that divides no layers (tp_size=1, pp_size=1)."
        )
