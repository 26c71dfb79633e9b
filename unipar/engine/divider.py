"""A divider: the part of a :class:`StepEngine` that gives a rank its part of each sample."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import nn

from unipar.data.batch import MicroBatch
from unipar.loss import LossFn

PartOf = Callable[[Any], Any]
"""Gives this rank's part of a micro-batch's data, on the host or on the device."""


class Divider(Protocol):
    """Divides the data of a micro-batch among the ranks that get the same samples."""

    def dividing(
        self, model: nn.Module, microbatch: MicroBatch, loss_fn: LossFn
    ) -> AbstractContextManager[PartOf]:
        """Surround the forward pass of a micro-batch, its loss, and its backward pass. Collective.

        Args:
            model: what the loss function is given.
            microbatch: whole, the same on all of these ranks.
            loss_fn: is given the part.

        Raises:
            ConfigError: the data, the model or the loss cannot be divided.
        """
        ...
