"""A torchmetrics metric over the samples of all ranks."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from unipar.data import move_to
from unipar.world import World


@contextlib.contextmanager
def merged(metric: Any, world: World) -> Iterator[None]:
    """Within the block, ``metric`` holds what all ranks have put into it. Collective.

    torchmetrics gathers its states tensor by tensor, which needs as many of them, of the same type,
    on every rank. A rank without samples, or with one more than others, breaks that: seen with
    torchmetrics 1.9, the processes abort or wait for each other. So states are gathered whole here.

    Args:
        metric: a torchmetrics metric, also one made of others; anything else is left to itself.
        world: the joined processes.
    """
    parts = [part for part in _modules(metric) if hasattr(part, "_reductions")]
    if world.size == 1 or not parts:
        yield
        return
    own = [{name: getattr(part, name) for name in part._reductions} for part in parts]
    gathered = world.gather(move_to(own, torch.device("cpu")) if world.leads else None)
    every = [of_rank for of_rank in gathered if of_rank is not None]
    available = [part.distributed_available_fn for part in parts]
    for i, part in enumerate(parts):
        for name, reduction in part._reductions.items():
            states = move_to([rank[i][name] for rank in every], world.device)
            setattr(part, name, _merge(states, reduction))
        part.distributed_available_fn = _not_distributed
    try:
        with warnings.catch_warnings():
            # Said of a rank that had no samples, though others had.
            warnings.filterwarnings("ignore", "The ``compute`` method of metric")
            yield
    finally:
        for part, states, function in zip(parts, own, available, strict=True):
            for name, state in states.items():
                setattr(part, name, state)
            part.distributed_available_fn = function


def _modules(metric: Any) -> list[Any]:
    return list(metric.modules()) if isinstance(metric, torch.nn.Module) else []


def _merge(states: list[Any], reduction: Any) -> Any:
    if isinstance(states[0], list):
        return list(itertools.chain.from_iterable(states))
    stacked = torch.stack(states)
    return stacked if reduction is None else reduction(stacked)


def _not_distributed() -> bool:
    return False
