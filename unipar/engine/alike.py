"""Hyperparameters, by which every rank has to step alike.

Where a rank changes a learning rate by what it alone knows, as the accuracy on its part of a batch,
replicas become different models, and shards parts of none. No loss shows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from torch.optim import Optimizer

from unipar.combined import optimizers_in
from unipar.errors import ConfigError
from unipar.world import World
from unipar.world.processes import FINGERPRINTS

_Number = tuple[str, int, str, Any]
"""The optimizer's name, the index of a group of parameters, what is set, and to what."""


def fingerprint(optimizer: Optimizer) -> int:
    """A number below :data:`unipar.world.processes.FINGERPRINTS` that tells hyperparameters apart.

    Numbers on the host count. What is a tensor is left out: to look at it, one may have to wait.
    """
    # Numbers have the same hash in every process; words have not.
    return hash(tuple(value for _, _, _, value in _numbers(optimizer))) % FINGERPRINTS


def refuse_unlike(optimizer: Optimizer, world: World) -> NoReturn:
    """Say which hyperparameter differs between ranks. Collective.

    Raises:
        ConfigError: always.
    """
    first, *others = world.gather([*_numbers(optimizer)])
    told = "their groups of parameters differ"
    for rank, own in enumerate(others, start=1):
        unlike = [(here, there) for here, there in zip(first, own, strict=False) if here != there]
        if unlike:
            (name, index, key, here), (_, _, _, there) = unlike[0]
            of = f" of optimizer '{name}'" if name else ""
            told = f"{key} of group {index}{of} is {here} on rank 0, and {there} on rank {rank}"
            break
    raise ConfigError(
        f"the ranks would step by different hyperparameters: {told}. Nothing was updated by this "
        "step. Change them on all ranks alike: by what all of them have, as the loss of "
        "engine.step(), a metric of an evaluation or world.gather(…), and not by what a rank reads "
        "of its own part of a batch."
    )


def _numbers(optimizer: Optimizer) -> Iterator[_Number]:
    """Each number, or tuple of numbers, that an optimizer of torch's was given."""
    for name, one in optimizers_in(optimizer).items():
        keys = tuple(getattr(one, "defaults", ()))
        for index, group in enumerate(one.param_groups):
            for key in keys:
                value = group.get(key)
                if isinstance(value, (int, float)):
                    # What is no number is not itself, and its hash is that of an address.
                    yield name, index, key, value if value == value else -1
                elif isinstance(value, (list, tuple)):
                    yield name, index, key, tuple(v for v in value if isinstance(v, (int, float)))
