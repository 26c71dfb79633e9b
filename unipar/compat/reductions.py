"""How a loss reduces its samples to one number, as its autograd graph has it."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

import torch

from unipar.compat.graph_nodes import (
    counts,
    couples,
    divisor,
    inverse,
    is_number,
    nodes_after,
    of_inputs,
    over_samples,
    passes,
    reduction,
    scalar,
    size_before,
    total_weight,
)
from unipar.compat.models import marks_output
from unipar.errors import ConfigError

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
        numbers: the nodes of what the loss is made of, down to its means or sums, which count by
            the same.
    """

    factor: float
    samples: int = 0
    counts: tuple[torch.Tensor, ...] = ()
    plain: bool = False
    unsure: bool = False
    numbers: tuple[Any, ...] = ()


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
    shares = graph.shares = graph.shares or {latest}
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
    numbers = tuple(graph.numbers)
    if kind == "sum":
        return Weight(factor, samples, numbers=numbers)
    return Weight(factor, samples, tuple(graph.counts), graph.plain, graph.unsure, numbers)


def is_of_part(value: torch.Tensor) -> bool:
    """Whether a value with a graph was computed of a part of a batch."""
    return any(one is not None and one[1] for one in _Graph(value).shares)


class _Graph:
    """What led from the outputs of models to a loss."""

    def __init__(self, loss: torch.Tensor) -> None:
        self._root: Any = loss.grad_fn
        self.shares: set[tuple[int, int] | None] = set()
        self.counts: list[torch.Tensor] = []
        self.numbers: list[Any] = []
        self.plain = self.unsure = False
        self._weight: float | None = None
        self._varying: set[Any] = set()
        self._outputs: set[Any] = set()
        above: dict[Any, list[Any]] = {}
        inside: list[Any] = []
        seen, todo = set(), [self._root]
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            # Of a loss that a model computes itself, all is inside of the model.
            if self._root not in self._outputs and marks_output(node):
                self._outputs.add(node)
                self.shares.add(node.metadata.get(_SHARE))
                if node is not self._root:
                    continue
            if of_inputs(node):
                inside.append(node)
            for following in nodes_after(node):
                above.setdefault(following, []).append(node)
                todo.append(following)
        # Where no output is found, and in a loss that a model computes itself by layers that are
        # not known, all of it may be of samples.
        self._all_vary = not self._outputs or (self._outputs == {self._root} and not inside)
        # A model's activations are of samples, too, also where none of its outputs led to them.
        todo = [*self._outputs, *inside]
        while todo:
            node = todo.pop()
            if node not in self._varying:
                self._varying.add(node)
                todo += above.get(node, ())

    @property
    def _samples(self) -> set[int]:
        """How many samples this rank has of batches."""
        return {one[0] for one in self.shares if one is not None and one[1]}

    def _varies(self, node: Any) -> bool:
        # Penalties of weights alone are the same on all ranks.
        return self._all_vary or node in self._varying

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
            if is_number(node):
                self.numbers.append(node)
            if not self._varies(node):
                constant = True
                continue
            if (kind := self._reduction(node)) is not None:
                kinds.add(kind)
                reduced.append(node)
                if kind == "mean":
                    self._count(node)
                continue
            name, following = node.name(), list(nodes_after(node))
            multiplies = name.startswith(("Mul", "Div"))
            if multiplies and self._reduction(following[0]) == "sum":
                count = divisor(node)
                if count is not None or (name.startswith("Div") and counts(node, self._samples)):
                    kinds.add("mean")
                    self._note_divisor(count)
                    reduced += following
                    continue
            varying = [one for one in following if self._varies(one)]
            self._refuse_counted(node)
            if not passes(name) or (multiplies and len(varying) > 1):
                raise ConfigError(
                    f"this loss comes to one number by {name.removesuffix('0')}, and each rank has "
                    "a part of the batch: it is neither a mean over samples nor a sum, so what it "
                    "would be of the whole batch cannot be told. Take means, as in loss.mean() or "
                    "reduction='mean', or sums alone; or run on one process."
                )
            divided |= name.startswith("Div")
            todo += varying if multiplies else following
        self._refuse_coupled(reduced, kinds)
        if "sum" not in kinds:
            return "mean"
        if self._weight is not None:
            raise ConfigError(
                f"this loss is a sum over samples that is multiplied by {self._weight:.4g}, and "
                f"this rank has {inverse(self._weight)} samples of the batch: whether that divides "
                "it by their number, or is a weight, cannot be told. Take a mean, or divide by "
                "len(x), for the one, and a weight that is a little different for the other."
            )
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

    def _reduction(self, node: Any) -> str | None:
        """How a node makes one number, or a row of them, of samples; ``None`` if it does not."""
        kind = reduction(node) or over_samples(node, self._samples)
        return None if kind is not None and self._is_of_numbers(node) else kind

    def _is_of_numbers(self, node: Any) -> bool:
        """Whether all that varies with samples was reduced before, as losses of tasks."""
        seen, todo = {node}, [one for one in nodes_after(node) if one in self._varying]
        samples = self._samples
        while todo:
            one = todo.pop()
            if one in seen:
                continue
            seen.add(one)
            if is_number(one) or over_samples(one, samples):
                continue
            following = [below for below in nodes_after(one) if below in self._varying]
            if one in self._outputs or not following:
                return False
            todo += following
        return len(seen) > 1

    def _note_divisor(self, count: torch.Tensor | None) -> None:
        if count is None:
            self.plain = True
        else:
            self.counts.append(count)
            self.unsure |= count.is_floating_point()

    def _count(self, node: Any) -> None:
        """Note what a mean is over, where that may differ from sample to sample."""
        if (weight := total_weight(node)) is not None:
            self.counts.append(weight)
        elif self._selects(node):
            found = float(size_before(node))
            self.counts.append(torch.tensor(found, dtype=torch.float64, device="cpu"))
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
            todo += [one for one in nodes_after(node) if self._varies(one)]
        return False

    def _refuse_counted(self, node: Any) -> None:
        by = scalar(node) if node.name().startswith("Mul") else None
        parts = {one[0] for one in self.shares if one is not None and one[0] < one[1]}
        if isinstance(by, int) and by in parts:
            raise ConfigError(
                f"this loss is multiplied by {by}, the number of samples that this rank "
                "has of the batch. Take reduction='sum' where that is meant, or write a weight "
                "that happens to be the same as a float."
            )
        if isinstance(by, float) and inverse(by) in parts:
            self._weight = by

    def _refuse_coupled(self, reduced: list[Any], kinds: set[str]) -> None:
        """Refuse what compares samples of a batch with each other before they are reduced."""
        if not self._outputs or self._root in self._outputs:
            return
        samples = self._samples
        seen, todo = set(), [one for node in reduced for one in nodes_after(node)]
        while todo:
            node = todo.pop()
            if node in seen or node not in self._varying or node in self._outputs:
                continue
            seen.add(node)
            if couples(node, samples, kinds):
                raise ConfigError(
                    f"this loss compares the samples of a batch with each other "
                    f"({node.name().removesuffix('0')} over the first dimension), and each rank "
                    "has a part of the batch: what it would be of the whole batch cannot be told. "
                    "Run on one process, or divide data yourself, with DistributedDataParallel."
                )
            todo += nodes_after(node)


def _listed(shares: set[tuple[int, int] | None]) -> str:
    return ", ".join(
        "a whole batch" if one is None or not one[1] else f"{one[0]} of {one[1]}"
        for one in sorted(shares, key=lambda one: one or (0, 0))
    )
