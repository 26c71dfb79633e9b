"""Tensors of which a rank holds a run of consecutive elements, as ZeRO divides them."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from unipar.state import Box, LocalState


def flat_state(name: str, shape: tuple[int, ...], start: int, held: torch.Tensor) -> LocalState:
    """Describe consecutive elements of a tensor as the boxes that they make.

    Args:
        name: the tensor's name.
        shape: its logical shape.
        start: the first element held, in row-major order.
        held: those elements, one-dimensional; the state is a view of them.
    """
    boxes = tuple(_boxes(shape, start, start + held.numel()))
    views: list[torch.Tensor] = []
    at = 0
    for box in boxes:
        size = math.prod(box.sizes)
        views.append(held[at : at + size].view(box.sizes))
        at += size
    return LocalState(name, shape, held.dtype, boxes, tuple(views))


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The fewest boxes that elements ``start`` to ``stop`` make, in their order."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if start < first * row:
        yield from _in_row(shape, first - 1, start, min(stop, first * row))
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last * row < stop and last >= first:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    row = math.prod(shape[1:])
    for box in _boxes(shape[1:], start - index * row, stop - index * row):
        yield Box((index, *box.offsets), (1, *box.sizes))
