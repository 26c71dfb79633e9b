"""Finding trainable parameters that no rank has used in a step.

To PyTorch's strategies they have no gradient, and stay as they are. To DeepSpeed 0.19.8 they have
one of zero in stages 1 and 2, by which AdamW decays them; in stage 3, and in stage 2 where the
optimizer is offloaded, they have that of the last step they were used in, from a buffer that is not
cleared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unipar.errors import ConfigError, first_few
from unipar.world import World


class Unused:
    """Watches which parameters get a gradient.

    Args:
        module: whose parameters; those that are frozen now are not watched.
        world: the joined processes.
    """

    def __init__(self, module: nn.Module, world: World) -> None:
        self._world = world
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._used: set[int] = set()
        self._under_way: tuple[Any, torch.Tensor] | None = None
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._seen)
            for parameter in parameters.values()
        ]

    def _seen(self, parameter: torch.Tensor) -> None:
        self._used.add(id(parameter))

    def clear(self) -> None:
        """Begin another step."""
        self._used.clear()

    def take(self) -> list[str]:
        """The names of those that no rank has used since the last call. Collective."""
        own = [name for key, name in self._names.items() if key not in self._used]
        self.clear()
        fewest = torch.full((), len(own), device=self._world.device)
        if self._world.size > 1:
            work = dist.all_reduce(fewest, dist.ReduceOp.MIN, async_op=True)
            # A collective that nobody waits for needs its tensor all the same.
            self._under_way = (work, fewest)
            # Some rank has used all, which is how it nearly always is; if it is this one, nothing
            # has to be waited for to know it.
            if own and work is not None:
                work.wait()
        if not own or not fewest.item():
            return []
        return _in_all(self._world.gather(own))

    def stop(self) -> None:
        for handle in self._handles:
            handle.remove()


def refusal(names: list[str], strategy: str) -> ConfigError:
    """Return the error about parameters that no rank has used."""
    listed = first_few([f"'{name}'" for name in names])
    return ConfigError(
        f"{strategy}: no rank has used {listed} in this step, and ZeRO would update it even so, "
        "by a gradient of zero, or one of an earlier step. Freeze what is never used "
        "(parameter.requires_grad_(False)), or train under ddp with find_unused_parameters=true. "
        "In stages 1 and 2, unused_parameters='zero_gradient' trains on with zeros."
    )


def _in_all(lists: Iterable[list[str]]) -> list[str]:
    first, *others = lists
    return [name for name in first if all(name in other for other in others)]
