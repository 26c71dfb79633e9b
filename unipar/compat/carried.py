"""Gradients that a script has in ``p.grad`` beside those of an engine's backward passes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from unipar.world import World


class CarriedGradients:
    """What the step of a script is by, too: engines begin each step without any gradient."""

    def __init__(self) -> None:
        self._kept: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._put: list[tuple[nn.Parameter, torch.Tensor, int]] = []
        self._zeroed: list[nn.Parameter] = []

    def __bool__(self) -> bool:
        return bool(self._kept or self._zeroed)

    @property
    def zeros(self) -> set[int]:
        """Ids of parameters whose gradients were cleared to zeros, and are these still."""
        return {
            id(parameter)
            for parameter, zero, version in self._put
            if parameter.grad is zero and zero._version == version
        }

    @property
    def parameters(self) -> set[nn.Parameter]:
        """Those that have some in the step that has begun."""
        return {*self._zeroed, *(parameter for parameter, _ in self._kept)}

    def put_zeros(self, parameters: Iterable[nn.Parameter]) -> None:
        """Set gradients to zeros, by which optimizers step, and note them."""
        self._put = []
        for parameter in parameters:
            parameter.grad = zero = torch.zeros_like(parameter)
            self._put.append((parameter, zero, zero._version))

    def take_zeros(self) -> None:
        """As a step begins, take along the zeros that are noted."""
        self._zeroed += [parameter for parameter, *_ in self._put]
        self._put = []

    def keep(self, gradients: Iterable[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """Keep gradients aside until :meth:`add`."""
        self._kept += gradients

    def average(self, parameters: Iterable[nn.Parameter], world: World) -> None:
        """Have on each rank the mean over ranks of what they keep. Collective.

        Args:
            parameters: all that may have some, in the same order on all ranks.
            world: the joined processes.
        """
        kept: dict[nn.Parameter, torch.Tensor] = {}
        for parameter, grad in self._kept:
            kept[parameter] = kept[parameter] + grad if parameter in kept else grad
        every = list(parameters)
        # A rank may have used others.
        used = set[int]().union(*world.gather({i for i, p in enumerate(every) if p in kept}))
        self._kept = []
        for parameter in (every[index] for index in sorted(used)):
            grad = kept.get(parameter, torch.zeros_like(parameter))
            dist.all_reduce(grad)
            self._kept.append((parameter, grad.div_(world.size)))

    def drop_cleared(self) -> None:
        """Drop those of parameters whose ``p.grad`` a script has set to ``None`` since a pass."""
        self._kept = [(one, grad) for one, grad in self._kept if one.grad is not None]
        self._zeroed = [one for one in self._zeroed if one.grad is not None]

    def add(self) -> None:
        """Add them to what is in ``p.grad``, and hold none any more."""
        for parameter, grad in self._kept:
            parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
        for parameter in self._zeroed:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self._kept, self._zeroed = [], []

    def forget(self) -> None:
        """Drop all that is held."""
        self._kept, self._put, self._zeroed = [], [], []
