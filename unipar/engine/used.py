"""Which parameters have gradients on any rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unipar.utils.host_copy import to_device


class UsedAnywhere:
    """What ranks tell one another of gradients that they have; collective where it is made.

    Args:
        parameters: the same on every rank, at least one.
        group: of the ranks.
        used: beside those with a gradient, what has one elsewhere.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: Any, used: Collection[nn.Parameter] = ()
    ) -> None:
        self._parameters = parameters
        there = [p.grad is not None or p in used for p in parameters]
        self._lacking = not all(there)
        flags = torch.tensor(there, dtype=torch.int32, device="cpu")
        self._flags = to_device(flags, parameters[0].device)
        self._work: Any = dist.all_reduce(
            self._flags, dist.ReduceOp.MAX, group=group, async_op=True
        )

    def unused(self) -> list[nn.Parameter]:
        """Those that have one on no rank; waits for the device only where this rank lacks some."""
        self._work.wait()
        if not self._lacking:
            return []
        return [p for p, one in zip(self._parameters, self._flags.tolist(), strict=True) if not one]
