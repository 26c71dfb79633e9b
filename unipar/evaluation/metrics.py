"""Metrics that accumulate over the samples of all ranks."""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import cloudpickle
import torch

from unipar.data import move_to
from unipar.errors import ConfigError
from unipar.world import World


def check_merges(name: str, metric: Any, world: World) -> None:
    """Refuse what would be a number of this rank's samples alone.

    Raises:
        ConfigError: there are several ranks, and nothing says how to merge what they have.
    """
    if world.size > 1 and not (hasattr(metric, "merge_state") or _parts(metric)):
        raise ConfigError(
            f"metrics['{name}'] is a {type(metric).__name__}, of which it is not known how those "
            f"of {world.size} processes make one. Use a metric of torchmetrics or torcheval, give "
            "its class a method merge_state(others), which takes in what a list of others has "
            "seen, or pass a function of (predictions, targets)."
        )


@contextlib.contextmanager
def merged(metric: Any, world: World) -> Iterator[Any]:
    """Yield the metric with what all ranks have put into it, for as long as the block. Collective.

    One with ``merge_state``, as torcheval's, is a copy. Of torchmetrics it is the metric itself.

    torchmetrics gathers its states tensor by tensor, which needs as many of them, of the same type,
    on every rank. A rank without samples, or with one more than others, breaks that: seen with
    torchmetrics 1.9, the processes abort or wait for each other. So states are gathered whole here.

    Args:
        metric: one that :func:`check_merges` lets pass.
        world: the joined processes.
    """
    if world.size == 1:
        yield metric
        return
    parts = _parts(metric)
    if not parts:
        yield _of_all(metric, world)
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
            yield metric
    finally:
        for part, states, function in zip(parts, own, available, strict=True):
            for name, state in states.items():
                setattr(part, name, state)
            part.distributed_available_fn = function


def _parts(metric: Any) -> list[Any]:
    """Torchmetrics' metrics that one is made of."""
    modules = metric.modules() if isinstance(metric, torch.nn.Module) else ()
    return [part for part in modules if hasattr(part, "_reductions")]


def _of_all(metric: Any, world: World) -> Any:
    own = copy.deepcopy(metric)
    if hasattr(own, "to"):
        own.to(torch.device("cpu"))
    sent = _pickled(own) if world.leads else None
    first, *others = [pickle.loads(one) for one in world.gather(sent) if one is not None]
    if hasattr(first, "to"):
        for one in (first, *others):
            one.to(world.device)
    first.merge_state(others)
    return first


def _merge(states: list[Any], reduction: Any) -> Any:
    if isinstance(states[0], list):
        return list(itertools.chain.from_iterable(states))
    stacked = torch.stack(states)
    return stacked if reduction is None else reduction(stacked)


def _not_distributed() -> bool:
    return False


def _pickled(metric: Any) -> bytes:
    """By value, as its class may be the script's own, which processes know so."""
    try:
        return cloudpickle.dumps(metric)
    except Exception as error:
        raise ConfigError(
            f"what a metric of the class {type(metric).__name__} has seen cannot be sent to other "
            f"processes ({error}). Have it hold what can be pickled, or give a function of "
            "(predictions, targets)."
        ) from error
