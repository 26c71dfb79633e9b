"""Finding trainable parameters that no rank has used in a step, or only some ranks.

To PyTorch's strategies they have no gradient, and stay as they are. To DeepSpeed 0.19.8 they have
one of zero in stages 1 and 2, by which AdamW decays them; in stage 3, and in stage 2 where the
optimizer is offloaded, they have that of the last step they were used in, from a buffer that is not
cleared.

In each of these stages ranks sum gradients in the order in which they have them. Where ranks use
different parameters, those of one size are mixed up, and no error says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unipar.engine import USE_THE_SAME
from unipar.errors import ConfigError, first_few
from unipar.utils.host_copy import to_device
from unipar.world import World


class Unused:
    """Watches which parameters get a gradient.

    Args:
        module: whose parameters; those that are frozen now are not watched.
        world: the joined processes.
        alike: whether ranks have to use the same parameters, in the same order.
    """

    def __init__(self, module: nn.Module, world: World, *, alike: bool = True) -> None:
        self._world, self._alike = world, alike
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        # Of ids, no two processes have the same.
        self._numbers = {key: number for number, key in enumerate(self._names)}
        self._used: set[int] = set()
        self._order, self._usual = 0, -1
        self._under_way: tuple[Any, torch.Tensor] | None = None
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._seen)
            for parameter in parameters.values()
        ]

    def _seen(self, parameter: torch.Tensor) -> None:
        key = id(parameter)
        self._used.add(key)
        self._order = hash((self._order, self._numbers[key]))

    def clear(self) -> None:
        """Begin another step."""
        self._used.clear()
        self._order = 0

    def take(self, *, named: bool = True) -> list[str]:
        """The names of those that no rank has used since the last call. Collective.

        Args:
            named: whether they are asked for; else none are given.

        Raises:
            ConfigError: ranks have used different ones, and must not. Not every rank says so.
        """
        own = [name for key, name in self._names.items() if key not in self._used]
        # So that it has a negative, too.
        order = self._order % 2**62
        self.clear()
        if self._world.size == 1:
            return own if named else []
        given = torch.tensor([len(own), order, -order], device="cpu")
        least = to_device(given, self._world.device)
        work = dist.all_reduce(least, dist.ReduceOp.MIN, async_op=True)
        # A collective that nobody waits for needs its tensor all the same.
        self._under_way = (work, least)
        # Some rank has used all, and all ranks have come to them as in the step before, which is
        # how it nearly always is. If this one has, nothing has to be waited for to know it: were
        # ranks not alike, one of them at least would have come to others than before.
        new = self._alike and order != self._usual
        if not (new or (own and named)):
            return []
        if work is not None:
            work.wait()
        fewest, lowest, highest = least.tolist()
        if self._alike and lowest != -highest:
            raise _unlike(own, self._world.rank)
        self._usual = order
        return _in_all(self._world.gather(own)) if fewest and named else []

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


def _unlike(own: list[str], rank: int) -> ConfigError:
    left_out = f" It has not used {first_few([*map(repr, own)])}." if own else ""
    return ConfigError(
        f"deepspeed: in this step rank {rank} has used other parameters than another rank, or the "
        f"same in another order.{left_out} ZeRO sums gradients over ranks in the order in which "
        f"they are computed, so those of different parameters were mixed. {USE_THE_SAME}"
    )


def _in_all(lists: Iterable[list[str]]) -> list[str]:
    first, *others = lists
    return [name for name in first if all(name in other for other in others)]
