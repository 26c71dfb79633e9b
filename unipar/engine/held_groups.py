"""What the groups of an optimizer hold, which may change after a strategy has taken it, or not."""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from unipar.errors import ConfigError


class HeldGroups:
    """Compares the parameters of an optimizer's groups with those that a strategy knows.

    It looks at which they are, and at no value, in every step.

    Args:
        optimizer: whose groups a user may change.
        known: the parameters of its model.
        strategy: the name of the one that has taken both, for the message.
        apart: whether it steps another optimizer than this, or has other tensors in its groups than
            what is known, so that it is not told of a change.

    Attributes:
        apart: whether it does.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        known: Iterable[torch.Tensor],
        strategy: str,
        *,
        apart: bool = False,
    ) -> None:
        self._optimizer, self._strategy = optimizer, strategy
        self._known = set(known)
        self.note()
        held = [one for _, group in self._held for one in group]
        self.apart = apart or not held or not self._known.issuperset(held)

    def note(self) -> None:
        """Take them as they are: a framework may put others there as it steps."""
        self._held = self._now()

    def check(self) -> None:
        """Look at them before a step.

        Raises:
            ConfigError: the step would not be of what they hold.
        """
        before, now = self._held, self._now()
        if len(before) == len(now) and all(
            group is same and len(one) == len(other) and all(map(is_, one, other))
            for (group, one), (same, other) in zip(before, now, strict=True)
        ):
            return
        if self.apart:
            raise ConfigError(
                "the optimizer's param_groups hold other parameters than when the model and its "
                f"optimizer were prepared, and the strategy '{self._strategy}' knows what it "
                "divides since then. Build the groups before; or use a strategy that leaves the "
                "optimizer whole, such as ddp without shard_optimizer."
            )
        foreign = sum(one not in self._known for _, group in now for one in group)
        if foreign:
            raise ConfigError(
                f"the optimizer's param_groups were given {foreign} parameters that the model did "
                "not have when it was prepared, so their gradients would not be summed over "
                "ranks. Put what is new into the model before its first forward pass, or give it "
                "an optimizer of its own."
            )

    def _now(self) -> list[tuple[dict[str, Any], list[torch.Tensor]]]:
        # Stage 3 of ZeRO has none in its groups between steps.
        return [(group, [*group["params"]]) for group in self._optimizer.param_groups]
