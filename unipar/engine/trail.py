"""The parts of a model that a rank's passes came to, which are to be the same on every rank.

Where parameters are divided, ranks gather them for one block after another, and sum gradients
likewise. What a rank sends is paired with what the others send next, by order alone. Blocks of one
size that ranks take in another order, or leave out, are then mixed up, and no error says so.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NoReturn

import torch
from torch import nn

from unipar.errors import ConfigError, first_few
from unipar.world import World

USE_THE_SAME = (
    "Use the same parts of the model in the same order on every rank: draw which layers are left "
    "out (LayerDrop, stochastic depth) by a generator that is seeded alike on all of them. Or "
    "train under 'ddp:find_unused_parameters=true' or 'horovod'. See docs/unused-parameters.md."
)


class Trail:
    """Parts that were entered for a pass with gradients, and parameters that have got a gradient.

    Nothing here waits, or asks another rank, but for the first call of :meth:`look`.

    Args:
        strategy: as the user calls it.
        world: the joined processes.
        parameters: by name, those whose gradients all ranks sum.

    Attributes:
        mark: a number that tells what came so far from anything else; 0 at first.
    """

    def __init__(self, strategy: str, world: World, parameters: Mapping[str, nn.Parameter]) -> None:
        self._strategy, self._world, self._parameters = strategy, world, dict(parameters)
        self._looked = False
        self.clear()

    def clear(self) -> None:
        """Forget what came so far. All ranks do, or none."""
        self.mark = 0
        self._entered: Counter[str] = Counter()
        self._told: Counter[str] = Counter()
        self._with_gradient: tuple[bool, ...] = ()

    def entering(self, name: str) -> Callable[[], None]:
        """Return what is called whenever a part of that name is entered."""
        # The hash of a string is another one in each process, and those of numbers are not.
        number = zlib.crc32(name.encode())

        def enter() -> None:
            if torch.is_grad_enabled():
                self.mark = hash((self.mark, number))
                self._entered[name] += 1

        return enter

    def take(self) -> int:
        """Return :attr:`mark`, and begin to count for the next message."""
        self._told, self._entered = self._entered, Counter()
        return self.mark

    def look(self) -> None:
        """Note which parameters have a gradient, before an optimizer steps. Collective at first.

        What it notes is compared with the next loss that is reduced, one step late, or when the
        model is saved: nobody waits for a backward pass. Where each rank has a head of its own,
        the first step shows it.

        Raises:
            ConfigError: in the first call, ranks have gradients of other parameters.
        """
        self._with_gradient = tuple(p.grad is not None for p in self._parameters.values())
        self.mark = hash((self.mark, self._with_gradient))
        if not self._looked:
            self._looked = True
            self._refuse_gradients("Nothing was updated by this step.")

    def refuse_unlike(self) -> None:
        """Refuse what ranks have not alike. Collective.

        Raises:
            ConfigError: there is something.
        """
        first, *others = self._world.gather((self.mark, self._told))
        for rank, (_, told) in enumerate(others, start=1):
            parts = [name for name in {**first[1], **told} if first[1][name] != told[name]]
            if parts:
                name = parts[0]
                of = f"'{name}'" if name else "the model as a whole"
                self._refuse(
                    f"rank 0 has computed {of} {first[1][name]} times, and rank {rank} "
                    f"{told[name]} times. Nothing was updated by this step."
                )
        self._refuse_gradients(
            "The last step was taken by what came of it: go back to a checkpoint of before."
        )
        if any(mark != first[0] for mark, _ in others):
            self._refuse("the order is another one. Nothing was updated by this step.")

    def _refuse_gradients(self, became: str) -> None:
        first, *others = self._world.gather(self._with_gradient)
        for rank, own in enumerate(others, start=1):
            named = zip(self._parameters, first, own, strict=False)
            unlike = [(name, has) for name, has, other in named if has != other]
            if unlike:
                names = first_few([f"'{name}'" for name, _ in unlike])
                self._refuse(
                    f"of {names} either rank 0 or rank {rank} has a gradient, and the other one "
                    f"has none. {became}"
                )

    def _refuse(self, told: str) -> NoReturn:
        raise ConfigError(
            f"{self._strategy}: the ranks' passes went through different parts of the model: "
            f"{told} Ranks gather and sum the parts of a model in the order in which they come to "
            f"them, so weights or gradients of different parts were mixed. {USE_THE_SAME}"
        )
