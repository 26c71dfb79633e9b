"""Hyperparameters, by which every rank has to step alike.

Where a rank changes a learning rate by what it alone knows, as the accuracy on its part of a batch,
replicas become different models, and shards parts of none. No loss shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real
from typing import Any

from torch.optim import Optimizer

from unipar.combined import optimizers_in
from unipar.engine.state import HOW_NOT_WHAT
from unipar.errors import ConfigError
from unipar.world import World
from unipar.world.processes import FINGERPRINTS

_Name = tuple[str, int, str]
"""The optimizer's name, the index of a group of parameters, and what is set of it."""


def fingerprint(optimizer: Optimizer, before: int = 0) -> int:
    """A number below :data:`unipar.world.processes.FINGERPRINTS` that tells hyperparameters apart.

    Numbers on the host count. What is a tensor is left out: to look at it, one may have to wait.

    Args:
        optimizer: torch's, or several.
        before: another fingerprint, which has to be the same, too.
    """
    # Numbers have the same hash in every process; words have not.
    return hash((before, *(value for _, value in _numbers(optimizer)))) % FINGERPRINTS


def refuse_unlike(optimizer: Optimizer, world: World, *, explained: bool = False) -> None:
    """Say which hyperparameter differs between ranks. Collective.

    Args:
        optimizer: as :func:`fingerprint` has it.
        world: the joined processes.
        explained: whether something else may be all that ranks do not have in common.

    Raises:
        ConfigError: one does, or nothing else can.
    """
    first, *others = world.gather(dict(_numbers(optimizer)))
    told = "they did so in the step before, and are alike again"
    for rank, own in enumerate(others, start=1):
        unlike = [name for name in {**first, **own} if first.get(name) != own.get(name)]
        if unlike:
            optimizer_name, index, key = unlike[0]
            of = f" of optimizer '{optimizer_name}'" if optimizer_name else ""
            told = (
                f"{key} of group {index}{of} is {first.get(unlike[0])} on rank 0, "
                f"and {own.get(unlike[0])} on rank {rank}"
            )
            break
    else:
        if explained:
            return
    raise ConfigError(
        f"the ranks would step by different hyperparameters: {told}. Nothing was updated by this "
        "step. Change them on all ranks alike: by what all of them have, as the loss of "
        "engine.step(), a metric of an evaluation or world.gather(…), and not by what a rank reads "
        "of its own part of a batch."
    )


def _numbers(optimizer: Optimizer) -> Iterator[tuple[_Name, Any]]:
    """Each number, or tuple of numbers, that an optimizer of torch's was given."""
    for name, one in optimizers_in(optimizer).items():
        keys = [key for key in getattr(one, "defaults", ()) if key not in HOW_NOT_WHAT]
        for index, group in enumerate(one.param_groups):
            for key in keys:
                value = group.get(key)
                if isinstance(value, Real):
                    # What is no number is not itself, and its hash is that of an address.
                    yield (name, index, key), value if value == value else -1
                elif isinstance(value, (list, tuple)):
                    yield (name, index, key), tuple(v for v in value if isinstance(v, Real))
