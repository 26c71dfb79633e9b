"""What an optimizer does in its first step, and could not be kept on several ranks or in a file."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from unipar.engine.state import local_optimizers
from unipar.engine.stepper import Update
from unipar.engine.trials import torch_generators
from unipar.errors import ConfigError
from unipar.world import World


def watch_first_step(optimizer: Optimizer, world: World, step: Callable[[], Update]) -> Update:
    """Step, and refuse an optimizer that draws random numbers, or has state of no parameter.

    Args:
        optimizer: the user's.
        world: the joined processes.
        step: steps it.

    Raises:
        ConfigError: it does either.
    """
    before = torch_generators(world.device)
    update = step()
    name = type(optimizer).__name__
    after = torch_generators(world.device)
    if world.size > 1 and not all(map(torch.equal, before, after)):
        raise ConfigError(
            f"the optimizer {name} draws random numbers in its step. Ranks draw different ones, so "
            "replicas of the model would drift apart, and parts of it would not be those of one "
            "process. Where each rank holds the whole model (strategy ddp, horovod), give the "
            "optimizer a generator of its own, seeded alike on every rank: "
            "torch.Generator(device).manual_seed(seed)."
        )
    for one in local_optimizers(optimizer):
        strange = [key for key in one.state if not isinstance(key, torch.Tensor)]
        if strange:
            raise ConfigError(
                f"the optimizer {name} keeps state under {strange[0]!r}, which is no parameter, so "
                "no checkpoint would have it, and a resumed run would go on otherwise. Keep it in "
                "the optimizer's param_groups, which are saved, or in the state of a parameter."
            )
    return update
