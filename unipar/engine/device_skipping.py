"""Steps that the device itself leaves out, by the flag that fused optimizers take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from unipar.combined import optimizers_in

_TAKE_A_FLAG = {Adagrad, Adam, AdamW, SGD}


class DeviceSkipping:
    """Has an optimizer change nothing where a tensor on the device says so.

    torch's fused optimizers read ``optimizer.found_inf``, which is how a gradient scaler keeps them
    from stepping without the host's knowing (torch 2.13, amp/grad_scaler.py, ``step``).

    Args:
        optimizer: what steps.
        parameters: all that may have a gradient.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        self._optimizers: list[Any] = list(optimizers_in(optimizer).values())
        self._parameters = parameters
        self._stepped: set[int] = set()

    def possible(self) -> bool:
        """Whether the next step can be left to the device.

        Not where a parameter is stepped for the first time: fused SGD makes momentum of memory that
        it does not fill if it is then kept from stepping (torch 2.13, optim/sgd.py).
        """
        for optimizer in self._optimizers:
            # A class derived from one of these may do more in a step.
            fused = all(group.get("fused") for group in optimizer.param_groups)
            if type(optimizer) not in _TAKE_A_FLAG or not fused:
                return False
        first = len(self._stepped)
        self._stepped.update(i for i, p in enumerate(self._parameters) if p.grad is not None)
        return len(self._stepped) == first

    @contextlib.contextmanager
    def unless_finite(self, norm: torch.Tensor) -> Iterator[None]:
        """Let a step within change nothing unless ``norm`` is finite.

        Args:
            norm: scalar tensor.
        """
        found = norm.isfinite().logical_not().float()
        for optimizer in self._optimizers:
            optimizer.grad_scale, optimizer.found_inf = None, found
        try:
            yield
        finally:
            for optimizer in self._optimizers:
                del optimizer.grad_scale, optimizer.found_inf
