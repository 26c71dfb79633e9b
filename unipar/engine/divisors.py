"""What a loss is divided by, read from its graph: a mean over items is told from one over samples.

A mean over the unmasked tokens of a part of a batch is no share of the mean over the batch's. Each
part's is a sound loss, so that nothing else shows it. Nothing is computed or called for this.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from unipar.world import World

log = logging.getLogger("unipar")

# As torch 2.13 has them, derivatives.yaml: names of functions, and what each keeps (_saved_…).
_PASSED = (
    *("Add", "Sub", "Rsub", "Neg", "ToCopy", "Clone", "Alias", "View", "UnsafeView"),
    *("Squeeze", "Unsqueeze", "Select", "Stack", "Expand", "Permute", "T"),
)
_MEANS = (
    *("MseLoss", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss", "MultiMarginLoss"),
    *("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "MultilabelMarginLoss"),
)
_MEAN = 1
"""``reduction`` of a loss function, as its graph keeps it."""
_SUM = 2
_MOST = 200
"""Functions looked at; a loss of more terms is not read to its end."""


class Part:
    """What a loss of one micro-batch is divided by.

    Attributes:
        num_samples: of the micro-batch.
        found: the divisors in the order in which they are met, as numbers or tensors of one.
        sums: whether there are sums over the samples, and nothing else.
    """

    def __init__(self, loss: torch.Tensor, num_samples: int) -> None:
        self.num_samples = num_samples
        self.found: list[float | torch.Tensor] = []
        self.sums = False
        if loss.grad_fn is not None:
            self._read(loss.grad_fn)

    def values(self) -> list[float]:
        """The divisors, from the device."""
        return [float(one) for one in self.found]

    def _read(self, root: Any) -> None:
        waiting, seen, summed, scaled = [root], 0, False, False
        while waiting and seen < _MOST:
            node = waiting.pop()
            seen += 1
            # A user's own function has no number behind its name.
            kind, _, number = node.name().rpartition("Backward")
            if not number.isdecimal():
                continue
            if kind == "Div":
                other = node._saved_other
                if isinstance(other, torch.Tensor) and other.numel() == 1:
                    self.found.append(other.detach())
            elif kind == "Mean":
                self.found.append(float(math.prod(node._saved_self_sym_sizes)))
                continue
            elif kind in ("NllLoss", "NllLoss2D"):
                if node._saved_reduction == _MEAN:
                    self.found.append(node._saved_total_weight)
                summed |= node._saved_reduction == _SUM
                continue
            elif kind in _MEANS:
                if node._saved_reduction == _MEAN:
                    self.found.append(_num_inputs(node))
                summed |= node._saved_reduction == _SUM
                continue
            elif kind == "Sum":
                sizes = node._saved_self_sym_sizes
                summed |= len(sizes) > 0 and sizes[0] == self.num_samples
                # What is divided before it is summed.
                inner = [one for one, _ in node.next_functions if one is not None]
                waiting += [one for one in inner if one.name().startswith("DivBackward")]
                continue
            elif kind == "Mul":
                # A factor may be one over the number of samples.
                other = node._saved_other
                scaled |= not isinstance(other, torch.Tensor) or other.numel() == 1
            elif kind not in _PASSED:
                continue
            waiting += [one for one, _ in reversed(node.next_functions) if one is not None]
        self.sums = summed and not self.found and not scaled


def _num_inputs(node: Any) -> float:
    """Elements of a function's first argument, without asking for it: it may be offloaded."""
    before, place = node.next_functions[0]
    return math.nan if before is None else float(math.prod(before._input_metadata[place].shape))


def warn_of_parts(parts: Sequence[Part], world: World) -> bool:
    """Warn of a mean that is not over samples, where a batch is divided. Collective.

    Args:
        parts: of this rank's micro-batches that count.
        world: the joined processes.

    Returns:
        Whether there was something to warn of.
    """
    own = [(part.num_samples, part.sums, part.values()) for part in parts]
    every = [part for rank in world.gather(own) for part in rank]
    problem = _problem(every)
    if problem and world.rank == 0:
        log.warning("%s", problem)
    return bool(problem)


def _problem(parts: Sequence[tuple[int, bool, list[float]]]) -> str:
    # Of one sample nobody knows whether it is its own mean.
    if len(parts) < 2 or min(samples for samples, _, _ in parts) < 2:
        return ""
    first_samples, _, first = parts[0]
    if all(sums for _, sums, _ in parts):
        return (
            "the loss is a sum over samples, and counts as a mean over them: divided into "
            f"{len(parts)} parts a batch has another loss than in one. Return their mean, or "
            "unipar.LossSum(the sum, the number of what is summed)."
        )
    for samples, _, found in parts[1:]:
        if len(found) != len(first):
            continue
        for one, other in zip(first, found, strict=True):
            alike = math.isclose(one, other, rel_tol=1e-6)
            if not alike and not math.isclose(one * samples, other * first_samples, rel_tol=1e-6):
                return (
                    f"the loss is divided by {one:g} in a part of the batch with {first_samples} "
                    f"samples, and by {other:g} in one with {samples}, and parts count by their "
                    "samples. So the batch's loss is not the mean that one process would compute "
                    "of all of it. Return unipar.LossSum(sum, number of items): of tokens, or of "
                    "the weights of classes, whatever the mean is over."
                )
    return ""
