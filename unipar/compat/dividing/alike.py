"""Whether ranks that each run the whole of a script have the same."""

from __future__ import annotations

from typing import Any

import torch

from unipar.engine.replicas import unlike
from unipar.errors import ConfigError, first_few
from unipar.world import World

_OFTEN, _SELDOM = 16, 16
"""So many of the first passes are compared among ranks, and one of so many later on."""

UNSEEN = "as in a closure, an attribute of a class or a global"
"""Where trials of a model do not see what it keeps."""
TO_WHOLE = "Set divide_batches: false in unipar.yaml, and each rank computes the whole."


def is_looked_at(number: int) -> bool:
    """Whether what ranks have is compared in this pass."""
    return number <= _OFTEN or number % _SELDOM == 0


def check_alike(given: dict[str, Any], world: World, *, divides: bool) -> None:
    """Refuse what ranks have otherwise that is to be the same on all. Collective; waits.

    Args:
        given: tensors, and lists of numbers and texts.
        world: the joined processes.
        divides: whether models may compute parts of batches.

    Raises:
        ConfigError: it is not.
    """
    tensors = {name: one for name, one in given.items() if isinstance(one, torch.Tensor)}
    told = [one.shape if name in tensors else one for name, one in given.items()]
    first, *others = world.gather([tuple(one) for one in told])
    other = [
        name for at, name in enumerate(given)
        if any(len(one) != len(first) or one[at] != first[at] for one in others)
    ]  # fmt: skip
    with torch.no_grad():
        marked = [(name, one.detach()) for name, one in tensors.items()]
        # The sum alone is the same in another order.
        marked += [(f"the order of {name}", _ordered(one)) for name, one in marked
                   if one.numel() > 1]  # fmt: skip
        other = other or unlike(marked, world)
    if other:
        kept = (
            f" Or a model keeps something of batches where that is not seen, {UNSEEN}, so that "
            f"ranks have that of their parts. {TO_WHOLE}"
        )
        raise ConfigError(
            f"ranks do not have the same batch ({first_few(other)} of what the model is given). "
            "Each runs this script as one process would, so what it draws or reads must be the "
            "same on all of them. Seed what it draws by, before anything is drawn: random.seed(0), "
            "numpy.random.seed(0), torch.manual_seed(0), and generators of its own; and let data "
            "depend on neither the time nor the order of a set or of a directory."
            f"{kept if divides else ''}"
        )


def _ordered(one: torch.Tensor) -> torch.Tensor:
    if one.is_complex():
        one = torch.view_as_real(one)
    places = torch.linspace(1, 2, one.numel(), dtype=torch.float64, device=one.device)
    return one.flatten() * places
