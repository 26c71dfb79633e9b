"""Losses: a mean over samples, or a sum over items with its count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from unipar.errors import ConfigError
from unipar.state import is_dtensor

IGNORE_INDEX = -100
"""The label that Hugging Face models leave out of their loss."""


@dataclass(frozen=True, slots=True)
class LossSum:
    """A loss summed over items (tokens, unmasked pixels, …) and the number of those items.

    The loss of a step is the sum of all totals over the sum of all counts, across micro-batches and
    ranks, so it does not depend on how items fall into micro-batches.

    Attributes:
        total: scalar tensor with a gradient; the sum of the loss over this micro-batch's items.
        count: the number of items summed, as a number or a scalar tensor.
    """

    total: torch.Tensor
    count: torch.Tensor | float


Loss = torch.Tensor | LossSum
LossFn = Callable[[Any, Any], Loss]
"""``loss(model, batch)``: a scalar mean over the samples of the batch, or a :class:`LossSum`.

A :class:`unipar.Objective` is one, in its parts."""


def check_loss(loss: object, *, training: bool) -> None:
    """Raise :class:`ConfigError` unless ``loss`` is a scalar (with a gradient, in training)."""
    value = loss.total if isinstance(loss, LossSum) else loss
    if not isinstance(value, torch.Tensor):
        raise ConfigError(
            f"the loss function returned {type(loss).__name__}; "
            "return a scalar tensor (a mean over samples) or unipar.LossSum(total, count)."
        )
    if type(value) is not torch.Tensor and is_dtensor(value):
        raise ConfigError(
            "the loss is a DTensor: it was computed from parameters of the model where each rank "
            "holds a shard of them, which is everywhere but in the model's forward pass; in it, "
            "too, for layers that ranks divide (tp). Compute it from what layers give. A penalty "
            "of the weights is weight_decay of the optimizer; under a strategy that divides no "
            "layers, such as 'fsdp', it may be computed in the model's forward and returned with "
            "its output."
        )
    if value.numel() != 1:
        raise ConfigError(
            f"the loss has shape {tuple(value.shape)}, and must be a scalar. "
            "Take its mean, or return unipar.LossSum(loss.sum(), loss.numel())."
        )
    if value.is_complex():
        raise ConfigError(
            f"the loss is of {value.dtype}, and must be a real number. Take its .abs() or .real."
        )
    if training and not value.requires_grad:
        raise ConfigError(
            "the loss does not require grad: it was computed under no_grad, detached, "
            "or does not depend on any trainable parameter. Return the tensor that the model's "
            "output leads to, without .detach() or .item()."
        )
