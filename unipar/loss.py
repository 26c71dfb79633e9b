"""What a loss is: a mean over samples, or a sum over items with its count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
"""``loss(model, batch)``: a scalar mean over the samples of the batch, or a :class:`LossSum`."""


def model_output_loss(model: Any, batch: Any) -> Loss:
    """The loss of a model that computes its own, by the Hugging Face convention.

    The batch is passed as keyword arguments when it is a mapping, as positional arguments when it
    is a list or tuple, and as one argument otherwise. Where the batch has ``labels`` of shape
    ``(batch, length, …)``, the mean that the model returns is weighted by the number of labels
    that it is a mean of (causal language models drop the first of each row), so that padding does
    not make a mean of means.

    Raises:
        ConfigError: the output has no ``loss``.
    """
    if isinstance(batch, Mapping):
        output = model(**batch)
    elif isinstance(batch, (list, tuple)):
        output = model(*batch)
    else:
        output = model(batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise ConfigError(
            f"no loss was given, and the model's output ({type(output).__name__}) has no `.loss`. "
            "Pass loss=f with f(model, batch) -> scalar tensor or unipar.LossSum."
        )
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.dim() < 2 or labels.is_floating_point():
        return loss
    if _is_causal(model):
        labels = labels[:, 1:]
    count = (labels != IGNORE_INDEX).sum()
    # A mean over no label at all is NaN, and NaN times nothing would stay so.
    return LossSum(torch.where(count > 0, loss * count, torch.zeros_like(loss)), count)


def _is_causal(model: Any) -> bool:
    names = getattr(getattr(model, "config", None), "architectures", None) or []
    module = getattr(model, "module", model)
    return any(
        name.endswith(("ForCausalLM", "LMHeadModel"))
        for name in [*names, *(cls.__name__ for cls in type(module).__mro__)]
    )


def check_loss(loss: object, *, training: bool) -> None:
    """Raise :class:`ConfigError` unless ``loss`` is a scalar (with a gradient, in training)."""
    value = loss.total if isinstance(loss, LossSum) else loss
    if not isinstance(value, torch.Tensor):
        raise ConfigError(
            f"the loss function returned {type(loss).__name__}; "
            "return a scalar tensor (a mean over samples) or unipar.LossSum(total, count)."
        )
    if is_dtensor(value):
        raise ConfigError(
            "the loss is a DTensor: it was computed from parameters of the model outside of its "
            "forward pass, where each rank holds a shard of them. Compute it from what model(...) "
            "returns. A penalty of the weights is weight_decay of the optimizer, or is computed "
            "in the model's forward and returned with its output."
        )
    if value.numel() != 1:
        raise ConfigError(
            f"the loss has shape {tuple(value.shape)}, and must be a scalar. "
            "Take its mean, or return unipar.LossSum(loss.sum(), loss.numel())."
        )
    if training and not value.requires_grad:
        raise ConfigError(
            "the loss does not require grad: it was computed under no_grad, detached, "
            "or does not depend on any trainable parameter. Return the tensor that the model's "
            "output leads to, without .detach() or .item()."
        )
