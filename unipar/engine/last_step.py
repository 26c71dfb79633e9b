"""A step of which only the device knows, for a while, whether it was taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from unipar.combined import CombinedScheduler
from unipar.engine.absent import LoopCalls
from unipar.engine.kept_buffers import has_nan
from unipar.errors import NonFiniteLossError, first_few
from unipar.utils.host_copy import HostCopy


class LastStep:
    """The last step of an engine, until its gradient is known to be finite.

    The device has left the weights and the optimizer's state as they are if it is not. The host has
    gone on as if it were, and takes that back when it finds out.

    Args:
        norm: of the gradient, a scalar.
        error: made where the step was not taken.
        take_back: called before it is raised for the first time.
    """

    def __init__(
        self,
        norm: HostCopy,
        error: Callable[[], NonFiniteLossError],
        take_back: Callable[[], None],
    ) -> None:
        self._norm, self._error, self._take_back = norm, error, take_back
        self._known = False

    def check(self, *, again: bool = False) -> None:
        """Wait until it is known, and raise where the step was not taken.

        Args:
            again: whether to raise what was raised before.

        Raises:
            NonFiniteLossError: it was not.
        """
        taken, known, self._known = math.isfinite(self._norm.read()), self._known, True
        if taken or (known and not again):
            return
        if not known:
            self._take_back()
        raise self._error()


def keep_hyperparameters(scheduler: LRScheduler, optimizer: Optimizer) -> Callable[[], None]:
    """Keep where a scheduler stands, and what the optimizer's groups have of it.

    Returns:
        What takes later steps of the scheduler back.
    """
    schedulers = [(vars(one), dict(vars(one))) for one in _with_parts(scheduler)]
    groups = [
        (group, {key: _kept(value) for key, value in group.items() if key != "params"})
        for group in optimizer.param_groups
    ]

    def take_back() -> None:
        for attributes, before in schedulers:
            attributes.clear()
            attributes.update(before)
        for group, before in groups:
            for key, value in before.items():
                if isinstance(value, torch.Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value

    return take_back


def _with_parts(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """A scheduler and those that it is made of, at every depth."""
    yield scheduler
    if isinstance(scheduler, CombinedScheduler):
        parts: Any = scheduler.schedulers.values()
    else:
        # torch 2.13, optim/lr_scheduler.py: of SequentialLR and ChainedScheduler.
        parts = getattr(scheduler, "_schedulers", ())
    for part in parts:
        yield from _with_parts(part)


def _kept(value: Any) -> Any:
    """A group's value; a scheduler changes those in place that are tensors."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def not_finite(
    what: str,
    loss: float,
    step: int,
    module: nn.Module,
    calls: LoopCalls,
    count: float | None = None,
) -> NonFiniteLossError:
    """The error of a step whose loss or gradient norm (``what``) is not finite.

    Args:
        what: the loss, or the gradient norm.
        loss: of the step.
        step: 1-based.
        module: what has trained.
        calls: of the loop, for what to do.
        count: the items that the loss is a mean of, where they are known.
    """
    kept = "the weights are as they were before that step"
    # A mask may well be infinite.
    spoilt = [name for name, buffer in module.named_buffers() if has_nan(buffer)]
    if spoilt:
        kept += (
            f", but there is NaN in buffers of the model ({first_few(spoilt)}): load them from a "
            "checkpoint if its forward pass has put it there"
        )
    if count == 0:
        return NonFiniteLossError(
            f"no item of the global batch of step {step} was counted (unipar.LossSum or num_items "
            f"gave 0 everywhere), so its loss, a mean over items, is {loss}; {kept}. Look at the "
            "labels: a label of -100, or one that is masked, is no item. Leave samples without any "
            f"out of the data, take a larger global_batch_size, or {calls.skip} to leave such "
            "batches out.",
            step=step,
        )
    return NonFiniteLossError(
        f"the {what} of step {step} is not finite (loss {loss}); {kept}. Lower the "
        f"learning rate, clip with {calls.clip_to}, look at the batch, or {calls.skip} to "
        "leave such batches out.",
        step=step,
    )
