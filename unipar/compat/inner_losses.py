"""What a loss that a model computes of a rank's part of a batch counts for.

Its autograd graph tells: whether it is a mean or a sum, and of how many. Names of nodes and of what
they save are those of torch 2.13, tools/autograd/derivatives.yaml.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from unipar.compat.shares import Shares

UNSURE = "is divided by a tensor that may count what is summed, or be a constant"
"""What a later batch may tell."""
_REDUCTIONS = {1: "mean", 2: "sum"}
"""What torch's loss functions save of ``reduction``."""
_KINDS = ("mean", "sum", "count")
_LINEAR = (
    "Add", "Sub", "Rsub", "Neg", "Mul", "Div", "View", "Reshape", "Squeeze", "Unsqueeze", "ToCopy",
    "Clone", "Alias",
)  # fmt: skip
"""What may come after the reduction: of a sum over ranks it is the sum of what it is of each."""
_SELECTING = ("IndexBackward", "MaskedSelect", "IndexSelect")


class _NotTold(Exception):
    """A graph that does not tell."""


def share_of(loss: torch.Tensor, shares: Shares) -> torch.Tensor | float | str:
    """By what a rank's loss is multiplied, so that the mean over ranks is that of the whole batch.

    Collective if it is a mean over a count of its own.

    Args:
        loss: of this rank's part; a scalar tensor.
        shares: how the batch is divided.

    Returns:
        That; or why it cannot be told, as what the loss does.
    """
    size = len(shares.sizes)
    try:
        kind, count = _read(loss, shares.own)
    except _NotTold as why:
        return str(why)
    if count is None:
        return float(size) if kind == "sum" else shares.own * size / sum(shares.sizes)
    own = (
        count.double()
        if isinstance(count, torch.Tensor)
        else torch.full((), count, dtype=torch.float64, device=loss.device)
    )
    total = own.clone()
    dist.all_reduce(total, group=shares.group)
    return (own * size / total.clamp(min=1e-300)).to(loss.dtype)


def why_unsure(loss: torch.Tensor, shares: Shares) -> str:
    """Why a first loss of a model does not tell what later ones count for, if it does not.

    Collective; all ranks have the same answer.
    """
    try:
        kind, count = _read(loss, shares.own)
        unsure = isinstance(count, torch.Tensor) and count.is_floating_point()
        found = (kind, float(count) if unsure and count is not None else None)
    except _NotTold as why:
        found = (str(why), None)
    ranks: list[Any] = [None] * len(shares.sizes)
    dist.all_gather_object(ranks, found, group=shares.group)
    for kind, _ in ranks:
        if kind not in _KINDS:
            return kind
    if len({kind for kind, _ in ranks}) > 1:
        return "is reduced otherwise on each rank"
    if found[1] is not None and len(set(ranks)) == 1:
        return UNSURE
    return ""


def _read(loss: torch.Tensor, samples: int) -> tuple[str, torch.Tensor | int | None]:
    """Whether a loss is a mean, a sum, or a mean over a count of its own, and that count."""
    if loss.grad_fn is None:
        raise _NotTold("has no graph")
    kinds: set[str] = set()
    counts: list[torch.Tensor | int] = []
    divided = False
    seen, todo = set[Any](), [loss.grad_fn]
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind, name = _reduction(node), node.name()
        if kind is not None:
            kinds.add(kind)
            counts += _count(node) if kind == "mean" else ()
            continue
        following = [one for one, _ in node.next_functions if one is not None]
        if name.startswith(("Mul", "Div")) and following and _reduction(following[0]) == "sum":
            count = _divisor(node, following)
            if count is not None:
                kinds.add("mean")
                counts += [count]
                continue
            if name.startswith("Div") and _counts(node, following[0], samples):
                kinds.add("mean")
                continue
        if not name.startswith(_LINEAR) or (name.startswith("Mul") and len(following) > 1):
            raise _NotTold(f"comes to one number by {name.removesuffix('0')}")
        divided |= name.startswith("Div")
        todo += following
    if len(kinds) != 1:
        raise _NotTold("adds a mean and a sum" if kinds else "is made of no mean and no sum")
    if kinds == {"sum"} and divided:
        raise _NotTold("is a sum over samples that is divided afterwards")
    if not counts:
        return kinds.pop(), None
    if len(counts) > 1:
        raise _NotTold("adds means over numbers of their own")
    return "count", counts[0]


def _reduction(node: Any) -> str | None:
    """How a node makes one number of samples; ``None`` if it does not."""
    if any(len(one.shape) for one in getattr(node, "_input_metadata", ())):
        return None
    saved = getattr(node, "_saved_reduction", 0)
    if saved in _REDUCTIONS:
        return _REDUCTIONS[saved]
    return next((k for k in ("mean", "sum") if node.name().startswith(k.capitalize())), None)


def _count(node: Any) -> list[torch.Tensor | int]:
    """What a mean is over, where that may differ from sample to sample."""
    if node.name().startswith("NllLoss"):
        return [node._saved_total_weight]
    seen, todo = set[Any](), [node]
    while todo:
        one = todo.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        if one.name().startswith(_SELECTING):
            found = getattr(node, "_saved_self_sym_numel", None)
            return [node._saved_self.numel() if found is None else found]
        todo += [below for below, _ in one.next_functions]
    return []


def _divisor(node: Any, following: list[Any]) -> torch.Tensor | None:
    """The tensor that a sum is divided by, as by the sum of a mask; ``None`` for a number."""
    other = getattr(node, "_saved_other", None)
    if len(following) > 1 or not isinstance(other, torch.Tensor) or other.numel() != 1:
        return None
    # A number of Python's is a tensor here, too, but gives way to any other of its kind.
    small = torch.float16 if other.is_floating_point() else torch.int16
    least = torch.zeros((), dtype=small, device=other.device)
    if node.name().startswith("Mul") or torch.result_type(other, least) == small:
        return None
    return other.detach()


def _counts(node: Any, summed: Any, samples: int) -> bool:
    """Whether a sum is divided by the number of what it sums, so that it is a mean."""
    by = getattr(node, "_saved_other", None)
    if isinstance(by, torch.Tensor):
        by = by.item() if by.numel() == 1 else None
    numbers = {samples}
    if summed.name().startswith("Sum"):
        sizes = summed._saved_self_sym_sizes
        numbers |= {math.prod(sizes), sizes[0]}
    return by in numbers
