"""How a loss reduces its samples to one number, as its autograd graph has it."""

from __future__ import annotations

from typing import Any, Literal

import torch

from unipar.compat.models import marks_output
from unipar.errors import ConfigError

_MEAN, _SUM = 1, 2
"""What torch's loss functions save of ``reduction``."""


def refuse_inexact(loss: torch.Tensor) -> Literal["mean", "sum"]:
    """Whether a loss is a mean over samples, or a sum.

    Raises:
        ConfigError: it is a sum that is divided afterwards, or in part a mean and in part a sum, so
            that a rank's part of a batch does not tell what it would be of all of it.
    """
    kinds, divided = _reductions(loss)
    if "sum" not in kinds:
        return "mean"
    if kinds == {"sum"} and not divided:
        return "sum"
    raise ConfigError(
        "this loss is a sum over samples that is "
        + ("divided afterwards" if divided else "added to a mean")
        + ", and each rank has a part of the batch: what it would be of the whole batch cannot be "
        "told. Take means, as in loss.mean() or reduction='mean', or sums alone; or run on one "
        "process."
    )


def _reductions(loss: torch.Tensor) -> tuple[set[str], bool]:
    kinds: set[str] = set()
    divided, seen = False, set()
    todo: list[Any] = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen or marks_output(node):
            continue
        seen.add(node)
        name, saved = node.name(), getattr(node, "_saved_reduction", 0)
        whole = all(len(one.shape) == 0 for one in getattr(node, "_input_metadata", ()))
        if whole and (saved == _MEAN or name.startswith("Mean")):
            kinds.add("mean")
        elif whole and (saved == _SUM or name.startswith("Sum")):
            kinds.add("sum")
        else:
            divided |= name.startswith("Div")
            todo += [following for following, _ in node.next_functions]
    return kinds, divided
