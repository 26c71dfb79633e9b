"""Steps that the device itself leaves out, by the flag that fused optimizers take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._optimizers: list[Any] = list(optimizers_in(optimizer).values())
        self._first = True

    def possible(self) -> bool:
        """Return whether the next step can be left to the device; asked once for each.

        Not the first: it makes the optimizer's state, which is to be as it was.
        """
        first, self._first = self._first, False
        if first or not all(map(_takes_flag, self._optimizers)):
            return False
        # What comes after a step would be done after one that changed nothing, too.
        takers = [self._optimizer, *self._optimizers]
        return not any(getattr(one, "_optimizer_step_post_hooks", None) for one in takers)

    @contextlib.contextmanager
    def unless_finite(self, norm: torch.Tensor) -> Iterator[None]:
        """Let a step within change nothing unless ``norm`` is finite.

        Args:
            norm: scalar tensor.
        """
        # Zero times what is not finite is not zero: half the kernels that `isfinite` takes.
        found = (norm * 0).ne(0).float()
        for optimizer in self._optimizers:
            optimizer.grad_scale, optimizer.found_inf = None, found
        try:
            yield
        finally:
            for optimizer in self._optimizers:
                del optimizer.grad_scale, optimizer.found_inf


def _takes_flag(optimizer: Optimizer) -> bool:
    # A class derived from one of these may do more in a step.
    if type(optimizer) not in _TAKE_A_FLAG:
        return False
    return all(
        group.get("fused") and not _makes_momentum(optimizer, group)
        for group in optimizer.param_groups
    )


def _makes_momentum(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether SGD makes a momentum, of memory that it does not fill where it is kept from stepping.

    torch 2.13, optim/sgd.py, ``_fused_sgd``.
    """
    return bool(group.get("momentum")) and any(
        p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None
        for p in group["params"]
    )
