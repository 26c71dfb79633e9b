"""What a loss is divided by, read from its graph: a mean over items is told from one over samples.

A mean over the unmasked tokens of a part of a batch is no share of the mean over the batch's. Each
part's is a sound loss, so that nothing else shows it. Nothing is computed or called for this.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from unipar.engine.doubling import Doubling
from unipar.loss import Loss
from unipar.world import World

log = logging.getLogger("unipar")

# As torch 2.13 has them, derivatives.yaml: names of functions, and what each keeps (_saved_…).
_PASSED = (
    *("Add", "Sub", "Rsub", "Neg", "ToCopy", "Clone", "Alias", "View", "UnsafeView"),
    *("Squeeze", "Unsqueeze", "Select", "Stack", "Expand", "Permute", "T"),
)
_MEAN = 1
"""``reduction`` of a loss function, as its graph keeps it."""
_SUM = 2
_MOST = 200
"""Functions looked at; a loss of more terms is not read to its end."""


class _Way(NamedTuple):
    """How a term comes to the loss.

    Attributes:
        scaled: whether it is divided or multiplied by a number on the way.
        divisors: what it is divided by, if that is the last.
        summed: whether it is summed over the samples at once.
    """

    scaled: bool = False
    divisors: Sequence[float | torch.Tensor] = ()
    summed: bool = False


class Part:
    """What a loss of one micro-batch is divided by.

    Attributes:
        num_samples: of the micro-batch.
        found: the divisors in the order in which they are met, as numbers or tensors of one.
        sums: whether a term is a sum over the samples, by no factor that may be one over their
            number.
        of_sums: those of them that a sum over the samples is divided by.
    """

    def __init__(self, loss: torch.Tensor, num_samples: int) -> None:
        self.num_samples = num_samples
        self.found: list[float | torch.Tensor] = []
        self.sums = False
        self.of_sums: list[float | torch.Tensor] = []
        if loss.grad_fn is not None:
            self._read(loss.grad_fn)

    def values(self) -> tuple[list[float], list[float]]:
        """The divisors, and those of sums over the samples, from the device."""
        return [float(one) for one in self.found], [float(one) for one in self.of_sums]

    def _read(self, root: Any) -> None:
        waiting: list[tuple[Any, _Way]] = [(root, _Way())]
        seen, summed = 0, False
        while waiting and seen < _MOST:
            node, way = waiting.pop()
            seen += 1
            # A user's own function has no number behind its name.
            kind, _, number = node.name().rpartition("Backward")
            if not number.isdecimal():
                continue
            following = [one for one, _ in reversed(node.next_functions) if one is not None]
            if kind == "Mean":
                self.found.append(float(math.prod(node._saved_self_sym_sizes)))
            elif kind in _LOSSES:
                if node._saved_reduction == _MEAN:
                    self._found(_LOSSES[kind](node))
                # Of a model's outputs, whatever stands beside it.
                if node._saved_reduction == _SUM:
                    self.sums |= not way.scaled
                    self.of_sums += way.divisors
            elif kind == "Sum":
                sizes = node._saved_self_sym_sizes
                over = len(sizes) > 0 and sizes[0] == self.num_samples
                if over:
                    summed |= not way.scaled
                    self.of_sums += way.divisors
                # What is divided before it is summed.
                divided = [one for one in following if one.name().startswith("DivBack")]
                waiting += [(one, _Way(scaled=True, summed=over)) for one in divided]
            elif kind == "Div":
                divisors = self._found(_kept(node, "_saved_other"))
                if way.summed:
                    self.of_sums += divisors
                waiting += [(one, _Way(scaled=True, divisors=divisors)) for one in following]
            elif kind == "Mul":
                # A factor may be one over the number of samples.
                other = _kept(node, "_saved_other")
                by_number = not isinstance(other, torch.Tensor) or other.numel() == 1
                way = way._replace(scaled=way.scaled or by_number)
                waiting += [(one, way) for one in following]
            elif kind in _PASSED:
                waiting += [(one, way) for one in following]
        # Beside a mean it may be of weights, of which there happen to be as many.
        self.sums |= summed and not self.found

    def _found(self, divisor: Any) -> list[float | torch.Tensor]:
        """Take notice of a divisor; it, if it is a number."""
        if isinstance(divisor, torch.Tensor) and divisor.numel() == 1:
            divisor = divisor.detach()
        elif not isinstance(divisor, float):
            return []
        self.found.append(divisor)
        return [divisor]


def _kept(node: Any, name: str) -> Any:
    """What a function has kept of an argument; ``None`` where it would have to be brought back.

    A checkpointed region would be computed for it, and what is offloaded would be copied (hooks of
    saved tensors; torch 2.8 does not tell of them yet).
    """
    held = getattr(node, f"_raw{name}", None)
    return None if getattr(held, "unpack_hook", None) is not None else getattr(node, name)


def _num_inputs(node: Any) -> float:
    """Elements of a function's first argument, without asking for it: it may be offloaded."""
    before, place = node.next_functions[0]
    return math.nan if before is None else float(math.prod(before._input_metadata[place].shape))


_LOSSES = {
    **dict.fromkeys(("NllLoss", "NllLoss2D"), functools.partial(_kept, name="_saved_total_weight")),
    **dict.fromkeys(
        (
            *("MseLoss", "SmoothL1Loss", "HuberLoss", "SoftMarginLoss", "MultiMarginLoss"),
            *("BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "MultilabelMarginLoss"),
        ),
        _num_inputs,
    ),
}
"""What a loss function with ``reduction`` divides a mean by."""


class Divisors:
    """Compares what parts of a batch are divided by, in some steps, and warns once.

    Args:
        world: the joined processes.
    """

    def __init__(self, world: World) -> None:
        self._world, self._looks = world, Doubling()
        self._told = False
        self._parts: list[Part] | None = None

    def begin(self, steps: int, num_microbatches: int) -> None:
        """Begin the step after so many, of so many micro-batches on each rank."""
        due = self._looks.is_due(steps) and not self._told
        divided = num_microbatches * self._world.data_size > 1
        self._parts = [] if due and divided else None

    def note(self, loss: Loss, num_samples: int) -> None:
        """Read a micro-batch's loss, before its backward pass."""
        if self._parts is not None and num_samples and isinstance(loss, torch.Tensor):
            self._parts.append(Part(loss, num_samples))

    def forget(self) -> None:
        """Give up the step."""
        self._parts = None

    def compare(self) -> None:
        """Warn of a mean that is not over samples. Collective, where the step is looked at."""
        if self._parts is None:
            return
        own = [(part.num_samples, part.sums, *part.values()) for part in self._parts]
        self._parts = None
        problem = _problem([part for rank in self._world.gather(own) for part in rank])
        self._told = bool(problem)
        if problem and self._world.rank == 0:
            log.warning("%s", problem)


def _problem(parts: Sequence[tuple[int, bool, list[float], list[float]]]) -> str:
    # Of one sample nobody knows whether it is its own mean.
    if len(parts) < 2 or min(samples for samples, *_ in parts) < 2:
        return ""
    first_samples, _, first, _ = parts[0]
    if all(sums for _, sums, *_ in parts):
        return (
            "the loss is or has a sum over samples, and counts as a mean over them: divided into "
            f"{len(parts)} parts a batch has another loss than in one. Return their mean, or "
            "unipar.LossSum(the sum, the number of what is summed)."
        )
    total = sum(samples for samples, *_ in parts)
    if all(any(math.isclose(one, total, rel_tol=1e-6) for one in by) for *_, by in parts):
        return (
            f"the loss is or has a sum over samples that is divided by {total}, which is how many "
            f"the whole batch has, and it is computed of {len(parts)} parts, each of which counts "
            "as a mean over its own samples. So it has another loss than in one part, unless that "
            "number is made of those of a part. Return their mean, or unipar.LossSum(the sum, the "
            "number of what is summed)."
        )
    for samples, _, found, _ in parts[1:]:
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
