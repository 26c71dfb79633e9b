"""Exchange between ranks in scripts of Horovod's style: new tensors, by value.

They use the default group of ``torch.distributed``, which ``script.open`` has seen to.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from unipar.engine import broadcast_tensors
from unipar.errors import ConfigError
from unipar.strategy import Engine
from unipar.world import World

Reduction = Literal["mean", "sum", "min", "max", "product"]
_OPS = {
    "mean": dist.ReduceOp.SUM,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def all_reduce(tensor: torch.Tensor, op: Reduction = "mean") -> torch.Tensor:
    """One tensor made of all ranks', without gradient. Collective.

    Args:
        tensor: of the same shape and dtype on all ranks.
        op: what it is made by.
    """
    result = tensor.detach().clone()
    dist.all_reduce(result, _OPS[op])
    return result / dist.get_world_size() if op == "mean" else result


def all_gather(tensor: torch.Tensor) -> torch.Tensor:
    """All ranks' tensors, one behind the other in the first dimension. Collective.

    Args:
        tensor: of at least one dimension, of which the first may differ between ranks.
    """
    own = tensor.detach().contiguous()
    lengths: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(lengths, own.shape[0])
    longest = max(lengths)
    padded = own.new_zeros((longest, *own.shape[1:]))
    padded[: own.shape[0]] = own
    parts = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(parts, padded)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])


def broadcast_weights(model: nn.Module, world: World) -> None:
    """Give all ranks rank 0's parameters and buffers. Collective."""
    broadcast_tensors(model.state_dict().values(), world)


def broadcast_optimizer(
    optimizer: torch.optim.Optimizer,
    world: World,
    engine: Engine | None,
    *,
    whole: bool,
    counted: bool,
) -> None:
    """Give all ranks rank 0's optimizer state, as Horovod does it. Collective.

    Args:
        optimizer: of a prepared model.
        world: the joined processes.
        engine: what holds it.
        whole: whether each rank has all of its state.
        counted: whether the state stays, and with it the step on gradients of zero.

    Raises:
        ConfigError: there is no state yet, and the strategy has taken its parameters away.
    """
    state = optimizer.state_dict()
    if world.broadcast(not state["state"]):
        _step_on_zeros(optimizer, engine, counted=counted)
        return
    if not whole:
        return
    sent = tree_map_only(torch.Tensor, lambda one: one.cpu(), state) if world.is_main else None
    state = world.broadcast(sent)
    if not world.is_main:
        optimizer.load_state_dict(state)


def _step_on_zeros(
    optimizer: torch.optim.Optimizer, engine: Engine | None, *, counted: bool
) -> None:
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    own = {id(one) for one in engine.module.parameters()} if engine is not None else set()
    if engine is not None and any(id(one) not in own for one in parameters):
        raise ConfigError(
            "Horovod's broadcast of a new optimizer takes a step on gradients of zero, which the "
            "strategy of this run cannot do. Take script.broadcast_optimizer(...) out: weights "
            "and state are equal on all ranks without it."
        )
    for one in parameters:
        one.grad = torch.zeros_like(one) if one.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    if not counted:
        optimizer.state.clear()
