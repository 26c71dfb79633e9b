"""What a loss that a model computes of a rank's part of a batch counts for.

Its autograd graph tells: whether it is a mean or a sum, and of how many. Names of nodes and of what
they save are those of torch 2.13, tools/autograd/derivatives.yaml.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unipar.compat.dividing.comparing import close
from unipar.compat.dividing.shares import Shares, mean_over
from unipar.engine.graphs import nodes_behind

UNSURE = "is divided by a tensor that is not the sum of those of parts, as by a constant"
"""What a later batch may tell, of which each part has something that counts."""
_NOT_OF_PARTS = "is not the mean or the sum of those of parts"
LITTLE = 1e-6
"""What is less than the largest by so much adds nothing to it, as an epsilon does not."""
_REDUCTIONS = {1: "mean", 2: "sum"}
"""What torch's loss functions save of ``reduction``."""
_KINDS = ("mean", "sum", "count", "divided")
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


class Divisor(NamedTuple):
    """What a sum is divided by in losses of one rank, or of several.

    Attributes:
        least: the least of them.
        most: the largest.
        nothing: whether any of the losses is zero, as that of a part in which nothing counts.
    """

    least: float
    most: float
    nothing: bool

    @classmethod
    def of_all(cls, ranks: Sequence[Divisor]) -> Divisor:
        """Those of several."""
        least, most = min(one.least for one in ranks), max(one.most for one in ranks)
        return cls(least, most, any(one.nothing for one in ranks))


class Divisors:
    """Whether what sums are divided by in parts adds up to what that of the whole is divided by.

    Counts do, as of what a mask marks. Where one is kept from being zero, as by ``clamp(min=1)``,
    that of a part with less is the bound, which is not less than any that was seen to add up.
    """

    def __init__(self) -> None:
        self._least: dict[Any, float] = {}

    def add_up(self, key: Any, found: Divisor) -> bool:
        """Whether they do for sure.

        Args:
            key: tells the losses of a model apart.
            found: those of all ranks.
        """
        if found.least <= LITTLE * found.most:
            # Zero divided by zero has no gradient.
            return found.least > 0
        least = self._least.get(key, math.inf)
        # At the bound itself there may have been less, and most bounds are 1.
        return not found.nothing and (found.least > least or found.least == least != 1)

    def note(self, key: Any, least: float) -> None:
        """Take notice that some have added up, of which this is the least."""
        self._least[key] = min(least, self._least.get(key, math.inf))


def kind_of_loss(loss: torch.Tensor, samples: int) -> tuple[str, Divisor | None]:
    """What :func:`share_of` goes by on this rank, the same on all; or what it cannot tell by.

    Args:
        loss: a scalar tensor.
        samples: of how many.

    Returns:
        That, and what it is divided by, if it is. It waits for the device if it is.
    """
    try:
        kind, count = _read(loss, samples)
    except _NotTold as why:
        return str(why), None
    if kind != "divided" or not isinstance(count, torch.Tensor):
        return kind, None
    by = float(count)
    # By what is no number, as by zero, nothing is divided.
    by = by if math.isfinite(by) else 0.0
    return kind, Divisor(by, by, float(loss.detach()) == 0)


def why_not_told(kind: str) -> str:
    """Why losses cannot be put together, of what :func:`kind_of_loss` says, if they cannot."""
    return "" if kind in _KINDS else f"it gives a loss that {kind}"


def weighed(loss: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    """A loss by what :func:`share_of` says; a mean over nothing, which is no number, is nothing."""
    if isinstance(factor, torch.Tensor):
        loss = torch.where(factor > 0, loss, torch.zeros_like(loss))
    return loss * factor


def why_apart(
    loss: torch.Tensor,
    whole: torch.Tensor,
    shares: Shares,
    divisors: Divisors,
    key: Any,
    rounding: float,
    *,
    first: bool,
) -> tuple[str, bool]:
    """Why losses of parts do not make that of the whole in a trial, if they do not.

    Collective.

    Args:
        loss: of this rank's part.
        whole: that of the whole.
        shares: how the batch is divided.
        divisors: what is known of those of the model.
        key: tells its losses apart.
        rounding: up to which differences they do.
        first: whether no earlier batch has told that they do.

    Returns:
        That, and whether this batch can tell.
    """
    ranks: list[Any] = [None] * len(shares.sizes)
    dist.all_gather_object(ranks, kind_of_loss(loss, shares.own), group=shares.group)
    why = next(filter(None, (why_not_told(kind) for kind, _ in ranks)), "")
    if not why and len({kind for kind, _ in ranks}) > 1:
        why = "it gives a loss that is reduced otherwise on each rank"
    if why:
        return why, True
    by = Divisor.of_all([one for _, one in ranks]) if ranks[0][1] is not None else None
    sure = by is None or divisors.add_up(key, by)
    if sure or (by is not None and by.least > 0 and not by.nothing):
        factor = share_of(loss, shares)
        assert not isinstance(factor, str)
        if close(mean_over(weighed(loss.detach(), factor), shares), whole, rounding):
            if by is not None:
                divisors.note(key, by.least)
            return "", True
        if by is None or (sure and not first):
            return f"it gives a loss that {_NOT_OF_PARTS}", True
    return (f"it gives a loss that {UNSURE}", True) if first else ("", False)


def _read(loss: torch.Tensor, samples: int) -> tuple[str, torch.Tensor | int | None]:
    """Whether a loss is a mean, a sum, or a mean over a count of its own, and that count.

    Of a sum that is divided by a tensor it is not known whether that counts.
    """
    if loss.grad_fn is None:
        raise _NotTold("has no graph")
    kinds: set[str] = set()
    counts: list[torch.Tensor | int] = []
    divided = plain = by_tensor = False
    numels: list[int | None] = []
    seen, todo = set[Any](), [loss.grad_fn]
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind, name = _reduction(node), node.name()
        if kind is not None:
            if any(map(_puts_numbers_together, node.next_functions)):
                raise _NotTold("is a mean or a sum of others")
            kinds.add(kind)
            own = _count(node) if kind == "mean" else []
            counts += own
            plain |= not own
            numels += [_numel(node)] if kind == "mean" and not own else []
            continue
        following = [one for one, _ in node.next_functions if one is not None]
        if name.startswith(("Mul", "Div")) and following and _reduction(following[0]) == "sum":
            count = _divisor(node, following)
            if count is not None:
                kinds.add("mean")
                counts += [count]
                by_tensor = True
                continue
            if name.startswith("Div") and _counts(node, following[0], samples):
                kinds.add("mean")
                plain = True
                continue
        if not name.startswith(_LINEAR) or (name.startswith("Mul") and len(following) > 1):
            raise _NotTold(f"comes to one number by {name.removesuffix('0')}")
        other = getattr(node, "_saved_other", None)
        if len(following) == 1 and isinstance(other, torch.Tensor) and not _is_number(other):
            raise _NotTold("is multiplied or divided by a tensor")
        divided |= name.startswith("Div")
        todo += following
    if len(kinds) != 1:
        raise _NotTold("adds a mean and a sum" if kinds else "is made of no mean and no sum")
    if kinds == {"sum"} and divided:
        raise _NotTold("is a sum over samples that is divided afterwards")
    if not counts and len(numels) == 1 and numels[0] is not None:
        # Also of samples that have unlike numbers of values, as sequences without padding.
        return "count", numels[0]
    if any(one is not None and one % samples for one in numels):
        raise _NotTold("adds means over numbers of their own")
    if not counts:
        return kinds.pop(), None
    if len(counts) > 1 or plain:
        raise _NotTold("adds means over numbers of their own")
    return "divided" if by_tensor else "count", counts[0]


def _puts_numbers_together(edge: Any) -> bool:
    """Whether what is reduced are losses that were reduced before."""
    node = edge[0]
    if node is None or not node.name().startswith(("Stack", "Cat")):
        return False
    below = [one for one, _ in node.next_functions]
    return all(one is not None and _is_of_numbers(one) for one in below)


def _is_of_numbers(node: Any) -> bool:
    return not any(len(one.shape) for one in getattr(node, "_input_metadata", ()))


def _reduction(node: Any) -> str | None:
    """How a node makes one number of samples; ``None`` if it does not."""
    if not _is_of_numbers(node):
        return None
    saved = getattr(node, "_saved_reduction", 0)
    if saved in _REDUCTIONS:
        return _REDUCTIONS[saved]
    return next((k for k in ("mean", "sum") if node.name().startswith(k.capitalize())), None)


def _count(node: Any) -> list[torch.Tensor | int]:
    """What a mean is over, where that may differ from sample to sample."""
    if node.name().startswith("NllLoss"):
        return [node._saved_total_weight]
    selected = any(one.name().startswith(_SELECTING) for one in nodes_behind([node]))
    found = _numel(node) if selected else None
    return [] if found is None else [found]


def _numel(node: Any) -> int | None:
    """How many numbers a mean is over, if its node tells."""
    found = getattr(node, "_saved_self_sym_numel", None)
    if found is None:
        saved = getattr(node, "_saved_self", None)
        found = None if saved is None else saved.numel()
    return found


def _divisor(node: Any, following: list[Any]) -> torch.Tensor | None:
    """The tensor that a sum is divided by, as by the sum of a mask; ``None`` for a number."""
    other = getattr(node, "_saved_other", None)
    if len(following) > 1 or not isinstance(other, torch.Tensor) or other.numel() != 1:
        return None
    return None if node.name().startswith("Mul") or _is_number(other) else other.detach()


def _is_number(tensor: torch.Tensor) -> bool:
    """Whether it is a number of Python's, which gives way to any other of its kind."""
    if tensor.numel() != 1:
        return False
    small = torch.float16 if tensor.is_floating_point() else torch.int16
    least = torch.zeros((), dtype=small, device=tensor.device)
    return torch.result_type(tensor, least) == small


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
