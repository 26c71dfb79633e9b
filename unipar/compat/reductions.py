"""How a loss reduces its samples to one number, as its autograd graph has it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from unipar.compat.models import marks_output
from unipar.errors import ConfigError

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
_SHARE = "unipar.compat.share"


def note_share(output: torch.Tensor, share: tuple[int, int] | None) -> None:
    """Note on an output of which part of a batch it was computed."""
    node: Any = output.grad_fn
    if node is not None:
        node.metadata[_SHARE] = share


class Weight(NamedTuple):
    """What a rank's loss counts by, so that the mean over ranks is the loss of the whole batch.

    Attributes:
        factor: by the samples of the batch.
        samples: this rank's of it.
        counts: numbers of what its means are over, where these are not the same for each sample;
            ranks count by them, instead.
        plain: whether there are means over samples beside these.
        unsure: whether one of the counts may be a constant.
    """

    factor: float
    samples: int = 0
    counts: tuple[torch.Tensor, ...] = ()
    plain: bool = False
    unsure: bool = False


def weight_of(loss: torch.Tensor, size: int, latest: tuple[int, int] | None) -> Weight | None:
    """What a rank's loss counts by.

    Args:
        loss: of this rank's parts of batches.
        size: the number of ranks.
        latest: this rank's and all ranks' samples of the batch that was read last, for a loss in
            which no output of a model is found; ``None``, or 0 for all ranks', where each has
            it as a whole.

    Returns:
        Its weight; ``None`` if it is of whole batches.

    Raises:
        ConfigError: a rank's part does not tell what the loss would be of the whole.
    """
    graph = _Graph(loss)
    shares = graph.shares or {latest}
    if not any(one is not None and one[1] for one in shares):
        return None
    kind = graph.kind()
    factors = {
        Fraction(1) if one is None or not one[1]
        else Fraction(size) if kind == "sum"
        else Fraction(one[0] * size, one[1])
        for one in shares
    }  # fmt: skip
    if len(factors) > 1:
        raise ConfigError(
            "this loss is computed from several batches, which are cut up among ranks in other "
            f"proportions ({_listed(shares)} samples on this rank): what each counts for cannot be "
            "told once they are added. Call backward() on the loss of each, or take batches that "
            "the number of ranks divides, with drop_last=True."
        )
    factor = float(factors.pop())
    samples = next(one[0] for one in shares if one is not None and one[1])
    if kind == "sum":
        return Weight(factor, samples)
    return Weight(factor, samples, tuple(graph.counts), graph.plain, graph.unsure)


def is_of_part(value: torch.Tensor) -> bool:
    """Whether a value with a graph was computed of a part of a batch."""
    return any(one is not None and one[1] for one in _Graph(value).shares)


class _Graph:
    """What led from the outputs of models to a loss."""

    def __init__(self, loss: torch.Tensor) -> None:
        self._root: Any = loss.grad_fn
        self.shares: set[tuple[int, int] | None] = set()
        self.counts: list[torch.Tensor] = []
        self.plain = self.unsure = False
        self._varying: set[Any] = set()
        self._outputs: set[Any] = set()
        above: dict[Any, list[Any]] = {}
        seen, todo = set(), [self._root]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if marks_output(node):
                self._outputs.add(node)
                self.shares.add(node.metadata.get(_SHARE))
                continue
            for following in _following(node):
                above.setdefault(following, []).append(node)
                todo.append(following)
        todo = list(self._outputs)
        while todo:
            node = todo.pop()
            if node not in self._varying:
                self._varying.add(node)
                todo += above.get(node, ())

    def _varies(self, node: Any) -> bool:
        # Penalties of weights alone are the same on all ranks; where no output is found, and in
        # a loss that a model computes itself, all of it may be of samples.
        return not self._outputs or node in self._varying or self._outputs == {self._root}

    def kind(self) -> str:
        """Whether the loss is a mean over samples or a sum."""
        kinds: set[str] = set()
        divided = constant = False
        reduced: list[Any] = []
        seen, todo = set(), [self._root]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if not self._varies(node):
                constant = True
                continue
            if (kind := _reduction(node)) is not None:
                kinds.add(kind)
                reduced.append(node)
                if kind == "mean":
                    self._count(node)
                continue
            name, following = node.name(), list(_following(node))
            if name.startswith("Div") and (count := _divisor(node)) is not None:
                kinds.add("mean")
                self.counts.append(count)
                self.unsure |= count.is_floating_point()
                reduced += following
                continue
            if name.startswith("Div") and _counts(node):
                kinds.add("mean")
                self.plain = True
                reduced += following
                continue
            varying = [one for one in following if self._varies(one)]
            self._refuse_counted(node)
            if not _passes(name) or (name.startswith(("Mul", "Div")) and len(varying) > 1):
                raise ConfigError(
                    f"this loss comes to one number by {name.removesuffix('0')}, and each rank has "
                    "a part of the batch: it is neither a mean over samples nor a sum, so what it "
                    "would be of the whole batch cannot be told. Take means, as in loss.mean() or "
                    "reduction='mean', or sums alone; or run on one process."
                )
            divided |= name.startswith("Div")
            todo += following
        self._refuse_coupled(reduced, kinds)
        if "sum" not in kinds:
            return "mean"
        if kinds == {"sum"} and not divided and not constant:
            return "sum"
        how = (
            "divided afterwards"
            if divided
            else "added to "
            + ("a mean" if "mean" in kinds else "what is the same for every sample")
        )
        raise ConfigError(
            f"this loss is a sum over samples that is {how}, and each rank has a part of the "
            "batch: what it would be of the whole batch cannot be told. Take means, as in "
            "loss.mean() or reduction='mean', or sums alone; or run on one process."
        )

    def _count(self, node: Any) -> None:
        """Note what a mean is over, where that may differ from sample to sample."""
        if node.name().startswith("NllLoss"):
            # Of targets that are not ignored, the weights of their classes.
            self.counts.append(node._saved_total_weight)
        elif self._selects(node):
            found = getattr(node, "_saved_self_sym_numel", None)
            found = node._saved_self.numel() if found is None else found
            self.counts.append(torch.tensor(float(found), dtype=torch.float64, device="cpu"))
        else:
            self.plain = True

    def _selects(self, node: Any) -> bool:
        """Whether what is reduced was selected by a mask or by indices."""
        seen, todo = set(), [node]
        while todo:
            node = todo.pop()
            if node in seen or node in self._outputs:
                continue
            seen.add(node)
            if node.name().startswith(("IndexBackward", "MaskedSelect", "IndexSelect")):
                return True
            todo += [one for one in _following(node) if self._varies(one)]
        return False

    def _refuse_counted(self, node: Any) -> None:
        by = _scalar(node) if node.name().startswith("Mul") else None
        if not isinstance(by, int):
            return
        if any(one is not None and one[0] < one[1] and one[0] == by for one in self.shares):
            raise ConfigError(
                f"this loss is multiplied by {by}, the number of samples that this rank "
                "has of the batch. Take reduction='sum' where that is meant, or write a weight "
                "that happens to be the same as a float."
            )

    def _refuse_coupled(self, reduced: list[Any], kinds: set[str]) -> None:
        """Refuse what compares samples of a batch with each other before they are reduced."""
        if not self._outputs or self._root in self._outputs:
            return
        samples = {one[0] for one in self.shares if one is not None and one[1]}
        seen, todo = set(), [one for node in reduced for one in _following(node)]
        while todo:
            node = todo.pop()
            if node in seen or node not in self._varying or node in self._outputs:
                continue
            seen.add(node)
            if _couples(node, samples, kinds):
                raise ConfigError(
                    f"this loss compares the samples of a batch with each other "
                    f"({node.name().removesuffix('0')} over the first dimension), and each rank "
                    "has a part of the batch: what it would be of the whole batch cannot be told. "
                    "Run on one process, or divide data yourself, with DistributedDataParallel."
                )
            todo += _following(node)


def _following(node: Any) -> Iterator[Any]:
    return (one for one, _ in node.next_functions if one is not None)


def _is_number(node: Any) -> bool:
    return all(len(one.shape) == 0 for one in getattr(node, "_input_metadata", ()))


def _reduction(node: Any) -> str | None:
    """How a node makes one number of samples; ``None`` if it does not."""
    if not _is_number(node):
        return None
    name, saved = node.name(), getattr(node, "_saved_reduction", 0)
    if saved == _MEAN:
        return "mean"
    if saved == _SUM:
        return "sum"
    if not name.startswith(("Mean", "Sum")) or all(map(_of_numbers, _following(node))):
        return None
    return "mean" if name.startswith("Mean") else "sum"


def _of_numbers(node: Any) -> bool:
    """Whether a node gives numbers that were reduced before, one or several in a row."""
    if node.name().startswith(("Stack", "Cat")):
        return all(map(_is_number, _following(node)))
    return _is_number(node) and not node.name().endswith("AccumulateGrad")


def _counts(node: Any) -> bool:
    """Whether a sum is divided by the number of what it sums, so that it is a mean."""
    following = next(_following(node))
    by = _scalar(node)
    if by is None or _reduction(following) != "sum" or not following.name().startswith("Sum"):
        return False
    sizes = following._saved_self_sym_sizes
    return len(sizes) > 0 and by in (math.prod(sizes), sizes[0])


def _divisor(node: Any) -> torch.Tensor | None:
    """The tensor that a sum is divided by, as by the sum of a mask; ``None`` for a number."""
    other = getattr(node, "_saved_other", None)
    (summed, _), (divisor, _) = (*node.next_functions, (None, 0))[:2]
    if divisor is not None or summed is None or _reduction(summed) != "sum":
        return None
    if not isinstance(other, torch.Tensor) or other.numel() != 1:
        return None
    # A number of Python's is a tensor here, too, but gives way to any other of its kind.
    small = torch.float16 if other.is_floating_point() else torch.int16
    least = torch.zeros((), dtype=small, device=other.device)
    return None if torch.result_type(other, least) == small else other.detach()


def _scalar(node: Any) -> int | float | None:
    """The number that a product or a quotient was made with."""
    other = getattr(node, "_saved_other", None)
    if isinstance(other, torch.Tensor):
        return other.item() if other.numel() == 1 else None
    return other


def _passes(name: str) -> bool:
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
        following = list(_following(node))
        todo += following
        if not any(map(_is_weight, following)) and _couples(node, {samples}, set()):
            return node.name().rstrip("0123456789").removesuffix("Backward")
    return ""


def _is_weight(node: Any) -> bool:
    while node.name().startswith(("TBackward", "Transpose", "Permute", "ToCopy", "View")):
        node = next(_following(node), None)
        if node is None:
            return False
    return node.name().endswith("AccumulateGrad")


def _couples(node: Any, samples: set[int], kinds: set[str]) -> bool:
    name = node.name()
    if name.startswith("Mm"):
        shape = tuple(node._input_metadata[0].shape)
        return shape[0] == shape[1] and shape[0] in samples and len(list(_following(node))) > 1
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


def _listed(shares: set[tuple[int, int] | None]) -> str:
    return ", ".join(
        "a whole batch" if one is None or not one[1] else f"{one[0]} of {one[1]}"
        for one in sorted(shares, key=lambda one: one or (0, 0))
    )
