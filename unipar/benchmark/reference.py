"""Which losses are right, and how far from them rounding alone may lead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from unipar.benchmark.cells import REFERENCE, Cell
from unipar.benchmark.result import Parity
from unipar.benchmark.store import Finding
from unipar.strategy import Precision

FACTOR = 10
"""A difference that is so many times what another micro-batch makes is more than rounding."""

_EPS = torch.finfo(torch.float32).eps
_UNDIVIDED = 1000 * _EPS


@dataclass(frozen=True)
class Reference:
    """The losses that all cells of one precision are compared with.

    Attributes:
        label: of the cell that they come from.
        losses: of each step.
        allowed: the largest relative difference that rounding explains: ``FACTOR`` times the
            largest that comes of dividing the same batch into more micro-batches, which changes
            nothing but the order in which numbers are added up. Where a batch cannot be divided, a
            thousand units in the last place of fp32.
    """

    label: str
    losses: list[float]
    allowed: float

    def parity(self, losses: Sequence[float]) -> Parity:
        """How far other losses of the same steps are from these."""
        difference = largest_difference(losses, self.losses)
        return Parity(
            reference=self.label,
            difference=difference,
            allowed=self.allowed,
            drifts=not difference <= self.allowed,
        )


def find_references(
    trial: Callable[[Cell], Finding | None], cells: Sequence[Cell], global_batch_size: int | None
) -> dict[Precision, Reference]:
    """Run the reference of each precision, and it again in smaller micro-batches.

    That is one process without a framework, or the first cell that runs, where the model fits no
    single device. A precision of which no cell runs has no reference.

    Args:
        trial: runs the first repeat of a cell, or says what it has found before.
        cells: what will be compared.
        global_batch_size: samples of one step.
    """
    found: dict[Precision, Reference] = {}
    precisions: list[Precision] = sorted({cell.precision for cell in cells}, reverse=True)
    for precision in precisions:
        own = [cell for cell in cells if cell.precision == precision and not cell.raw]
        for candidate in (Cell(strategy=REFERENCE, precision=precision), *own):
            finding = trial(candidate)
            if finding is None:
                continue
            losses = finding.trial.losses
            apart = [
                largest_difference(variant.trial.losses, losses)
                for cell in divided(candidate, global_batch_size)
                if (variant := trial(cell)) is not None
            ]
            allowed = FACTOR * max(*apart, _EPS) if apart else _UNDIVIDED
            found[precision] = Reference(candidate.label, losses, allowed)
            break
    return found


def reference_cells(cells: Sequence[Cell], global_batch_size: int | None) -> list[Cell]:
    """The cells that references take, where one process without a framework can run."""
    precisions: dict[Precision, None] = {cell.precision: None for cell in cells}
    singles = [Cell(strategy=REFERENCE, precision=precision) for precision in precisions]
    return [one for single in singles for one in (single, *divided(single, global_batch_size))]


def divided(cell: Cell, global_batch_size: int | None) -> list[Cell]:
    """The same cell with its micro-batch in two, and in four."""
    if global_batch_size is None:
        return []
    whole = cell.micro_batch_size or -(-global_batch_size // cell.devices)
    sizes = dict.fromkeys(-(-whole // parts) for parts in (2, 4))
    return [cell.model_copy(update={"micro_batch_size": size}) for size in sizes if size < whole]


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest ``|a - b| / |b|``; infinite where one is no number or they are not as many."""
    if len(losses) != len(reference):
        return float("inf")
    apart = [
        abs(a - b) / abs(b) if b else float(a != b) for a, b in zip(losses, reference, strict=True)
    ]
    return max((one if one == one else float("inf") for one in apart), default=0.0)
