"""What nodes of an autograd graph tell of how samples were reduced or set in relation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

_MEAN, _SUM = 1, 2
"""What torch's loss functions save of ``reduction``; names of nodes and of what they save are those
of torch 2.13, tools/autograd/derivatives.yaml."""
_LINEAR = (
    "Add", "Sub", "Rsub", "Neg", "Mul", "Div", "View", "Reshape", "Squeeze", "Unsqueeze", "Select",
    "Stack", "Cat", "ToCopy", "Clone", "Alias", "Expand", "CopyBackwards", "Index", "Permute",
)  # fmt: skip
"""What may come after the reduction: of a sum over ranks it is the sum of what it is of each."""
_COMPARING = (
    "Sum", "Mean", "Std", "Var", "Topk", "Sort", "MaxBackward", "MinBackward", "Amax", "Amin",
    "Logsumexp", "Norm", "LinalgVectorNorm", "Prod", "Median", "Kthvalue", "Cumsum",
)  # fmt: skip
"""What makes fewer of several, or sets them in relation."""
_HOOKS = ("Sink", "PreBackward", "PostBackward")
"""Nodes that a framework puts behind what a module gives."""


def nodes_after(node: Any) -> Iterator[Any]:
    return (one for one, _ in node.next_functions if one is not None)


def is_number(node: Any) -> bool:
    return all(len(one.shape) == 0 for one in getattr(node, "_input_metadata", ()))


def reduction(node: Any) -> str | None:
    """How a node makes one number of samples; ``None`` if it does not."""
    if not is_number(node):
        return None
    name, saved = node.name(), getattr(node, "_saved_reduction", 0)
    if saved == _MEAN:
        return "mean"
    if saved == _SUM:
        return "sum"
    if not name.startswith(("Mean", "Sum")) or all(map(of_numbers, nodes_after(node))):
        return None
    return "mean" if name.startswith("Mean") else "sum"


def over_samples(node: Any, samples: set[int]) -> str | None:
    """How a node makes a row of numbers of samples, along their dimension alone.

    Args:
        node: of a graph.
        samples: how many there are; a dimension of as many is known by being the only one.
    """
    name = node.name()
    if not name.startswith(("Mean", "Sum")) or not couples(node, samples, set()):
        return None
    sizes: tuple[int, ...] = tuple(getattr(node, "_saved_self_sym_sizes", ()))
    if not sizes or any(one in samples for one in sizes[1:]):
        return None
    return "mean" if name.startswith("Mean") else "sum"


def of_inputs(node: Any) -> bool:
    """Whether a node is a layer's that computes of what needs no gradient, as of a batch."""
    layer = node.name().startswith(("Addmm", "Mm", "Convolution", "Embedding"))
    return layer and any(one is None for one, _ in node.next_functions)


def of_numbers(node: Any) -> bool:
    """Whether a node gives numbers that were reduced before, one or several in a row."""
    if node.name().startswith(("Stack", "Cat")):
        return all(map(is_number, nodes_after(node)))
    return is_number(node) and not node.name().endswith("AccumulateGrad")


def total_weight(node: Any) -> torch.Tensor | None:
    """What a mean over classes divides by: the weights of targets that it does not ignore."""
    return node._saved_total_weight if node.name().startswith("NllLoss") else None


def size_before(node: Any) -> int:
    """How many numbers a mean is over."""
    found = getattr(node, "_saved_self_sym_numel", None)
    return node._saved_self.numel() if found is None else found


def counts(node: Any, samples: set[int]) -> bool:
    """Whether a sum is divided by the number of what it sums, so that it is a mean.

    Args:
        node: a quotient.
        samples: of parts of batches.
    """
    following = next(nodes_after(node))
    by = scalar(node)
    if by is None or reduction(following) != "sum":
        return False
    if following.name().startswith("Sum"):
        sizes = following._saved_self_sym_sizes
        samples = samples | {math.prod(sizes), sizes[0]}
    return by in samples


def divisor(node: Any) -> torch.Tensor | None:
    """The tensor that a sum is divided by, as by the sum of a mask; ``None`` for a number.

    Args:
        node: a quotient, or a product with the inverse of the tensor.
    """
    other = getattr(node, "_saved_other", None)
    (summed, _), (divisor, _) = (*node.next_functions, (None, 0))[:2]
    if divisor is not None or summed is None or reduction(summed) != "sum":
        return None
    if not isinstance(other, torch.Tensor) or other.numel() != 1:
        return None
    # A number of Python's is a tensor here, too, but gives way to any other of its kind.
    small = torch.float16 if other.is_floating_point() else torch.int16
    least = torch.zeros((), dtype=small, device=other.device)
    if torch.result_type(other, least) == small:
        return None
    if node.name().startswith("Mul"):
        # What is no inverse of a count is a weight.
        return None if inverse(other.item()) is None else other.detach().reciprocal()
    return other.detach()


def inverse(number: float) -> int | None:
    """The whole number above 1 that a float is the inverse of."""
    whole = round(1 / number) if number > 0 else 0
    return whole if whole > 1 and math.isclose(whole * number, 1, rel_tol=1e-5) else None


def scalar(node: Any) -> int | float | None:
    """The number that a product or a quotient was made with."""
    other = getattr(node, "_saved_other", None)
    if isinstance(other, torch.Tensor):
        return other.item() if other.numel() == 1 else None
    return other


def passes(name: str) -> bool:
    return name.startswith((*_LINEAR, "Mean", "Sum")) or any(one in name for one in _HOOKS)


def couples_inside(output: torch.Tensor, samples: int) -> str:
    """The operation by which a model itself compares the samples of a batch; empty if none does.

    Args:
        output: of the model.
        samples: of the part that it was computed of.
    """
    seen, todo = set(), [output.grad_fn]
    while todo and samples > 1:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        following = list(nodes_after(node))
        todo += following
        if not any(map(is_weight, following)) and couples(node, {samples}, set()):
            return node.name().rstrip("0123456789").removesuffix("Backward")
    return ""


def is_weight(node: Any) -> bool:
    while node.name().startswith(("TBackward", "Transpose", "Permute", "ToCopy", "View")):
        node = next(nodes_after(node), None)
        if node is None:
            return False
    return node.name().endswith("AccumulateGrad")


def couples(node: Any, samples: set[int], kinds: set[str]) -> bool:
    name = node.name()
    if name.startswith("Mm"):
        shape = tuple(node._input_metadata[0].shape)
        return shape[0] == shape[1] and shape[0] in samples and len(list(nodes_after(node))) > 1
    for kind in ("mean", "sum"):
        if name.startswith(kind.capitalize()) and {kind} == kinds:
            return False
    if not name.startswith(_COMPARING):
        return False
    try:
        sizes = getattr(node, "_saved_self_sym_sizes", None)
        sizes = tuple(node._saved_self.shape if sizes is None else sizes)
    except (AttributeError, RuntimeError):
        sizes = ()
    along = getattr(node, "_saved_dim", None)
    if along is None:
        along = range(len(sizes))
    along = [along] if isinstance(along, int) else along
    if sizes:
        # Negative numbers come as unsigned ones.
        along = [(one - 2**64 if one >= 2**63 else one) % len(sizes) for one in along]
    return 0 in along and (not sizes or sizes[0] in samples)
