"""Files and state dicts of a migrated script, and what rank 0 gives the others at the start."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from unipar.compat.gathering import GatheredModel, GatheredOptimizer, Unprepared
from unipar.errors import ConfigError
from unipar.migrated.script import exchange
from unipar.migrated.script.engines import is_prepared
from unipar.migrated.script.run import current, session, world


def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    """``torch.save`` on rank 0, which the others wait for. Collective."""
    ranks = world()
    if ranks.is_main:
        torch.save(obj, f, *args, **kwargs)
    ranks.barrier()


def whole(of: Any) -> Any:
    """A model or an optimizer, for its state dict.

    Raises:
        ConfigError: the strategy divides it among ranks, so that its state dict is a part.
    """
    run = session()
    sharded = run.capabilities.sharded if is_prepared(of) else frozenset()
    if sharded & ({"parameters"} if isinstance(of, nn.Module) else {"parameters", "optimizer"}):
        raise ConfigError(
            f"strategy '{run.strategy.name}' divides {', '.join(sorted(sharded))} among ranks, "
            f"so the state dict of this {type(of).__name__} is only a part. Save with "
            "script.session().save(directory) on all ranks, and load with its load(directory)."
        )
    return of


def gathered(of: Any, *, rank0_only: bool = False) -> Any:
    """A model or an optimizer, for state dicts of full tensors under any strategy.

    Their ``state_dict()`` and ``load_state_dict(...)`` are collective. An optimizer's is by the
    names of parameters. A model that is not prepared yet is as it is.

    Args:
        of: the model or the optimizer.
        rank0_only: whether the other ranks get nothing.
    """
    ranks = world()
    for one in reversed(current.engines):
        if of is one.engine.optimizer:
            return GatheredOptimizer(one.engine, ranks, rank0_only=rank0_only)
        if any(of is key for key in one.keys):
            return GatheredModel(one.engine, ranks, rank0_only=rank0_only)
    return Unprepared(of, ranks)


def broadcast_weights(model: nn.Module) -> None:
    """Give all ranks rank 0's parameters and buffers. Collective.

    Nothing where the strategy divides them: whatever sets them there does so on all ranks.
    """
    if not session().capabilities.sharded & {"parameters"}:
        exchange.broadcast_weights(model, world())


def broadcast_optimizer(optimizer: torch.optim.Optimizer, *, counted: bool = True) -> None:
    """Give all ranks rank 0's optimizer state, as ``hvd.broadcast_optimizer_state``. Collective.

    Where it has no state yet, Horovod takes a step on gradients of zero, which makes some, counts
    as the first, and decays weights; and so does this.

    Args:
        optimizer: of a prepared model.
        counted: whether the state of that step stays.

    Raises:
        ConfigError: the strategy cannot take that step.
    """
    holder = next((e for e, keys in current.engines if any(optimizer is key for key in keys)), None)
    whole = not session().capabilities.sharded & {"parameters", "optimizer"}
    exchange.broadcast_optimizer(optimizer, world(), holder, whole=whole, counted=counted)
