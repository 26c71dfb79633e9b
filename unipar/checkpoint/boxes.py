"""Arithmetic of boxes: the axis-aligned parts that a tensor is divided into."""

from __future__ import annotations

import functools
import itertools
import math
import secrets
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from unipar.errors import CheckpointError
from unipar.state import Box


def whole(shape: Sequence[int]) -> Box:
    """The box that is a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def volume(box: Box) -> int:
    """Number of elements in ``box``."""
    return math.prod(box.sizes)


def intersect(a: Box, b: Box) -> Box | None:
    """The part that two boxes of one tensor share, or ``None``."""
    offsets, sizes = [], []
    for a_start, a_size, b_start, b_size in zip(*a, *b, strict=True):
        start = max(a_start, b_start)
        size = min(a_start + a_size, b_start + b_size) - start
        if size <= 0:
            return None
        offsets.append(start)
        sizes.append(size)
    return Box(tuple(offsets), tuple(sizes))


_PRIME = 2**127 - 1
_POINTS = [secrets.randbelow(_PRIME - 2) + 2 for _ in range(64)]
"""A secret number for each dim, so that nobody can choose boxes that :func:`check_cover` takes for
others."""
MAX_DIMS = len(_POINTS)


def check_cover(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Hold that distinct ``boxes`` cover every element of a tensor exactly once.

    Raises:
        CheckpointError: a box leaves the tensor, two overlap, or elements are missing.
    """
    if len(boxes) == 1 and boxes[0] == whole(shape):
        return
    check_inside(name, shape, boxes)
    shown = _shown(name, shape)
    held, full = sum(map(volume, boxes)), math.prod(shape)
    if held < full:
        raise CheckpointError(f"{shown}: the ranks hold {held} of its {full} elements.")
    # Element (i, j, …) stands for the product of x**i, y**j, …, and a box for the sum of its own,
    # which is a product of differences of powers. (Each is times (x-1)(y-1)….) As polynomials the
    # sum over the boxes equals the whole where each element is there once; that they agree at a
    # random point all the same has a probability below 2**-60. Comparing boxes with each other
    # would take the square of their number.
    seen = sum(_fingerprint(*box) for box in boxes) % _PRIME
    if held > full or seen != _fingerprint((0,) * len(shape), shape) % _PRIME:
        raise CheckpointError(f"{shown}: {_overlapping(boxes)} overlap.")


def check_inside(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Hold that ``boxes`` lie in a tensor.

    Raises:
        CheckpointError: one does not.
    """
    for box in boxes:
        if not len(box.offsets) == len(box.sizes) == len(shape) or any(
            start < 0 or size < 0 or start + size > full
            for start, size, full in zip(*box, shape, strict=True)
        ):
            raise CheckpointError(f"{_shown(name, shape)} has no part {box}.")


def _shown(name: str, shape: Sequence[int]) -> str:
    return f"Tensor '{name}' of shape {tuple(shape)}"


def check_division(
    name: str, shape: Sequence[int], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> None:
    """As :func:`check_cover`, of many boxes in columns: ``(boxes, dims)``, none below 0.

    A grid is seen to be one without regarding each box by itself.
    """
    if offsets.shape[1] != len(shape) or not _is_grid(shape, offsets, sizes):
        pairs = zip(offsets.tolist(), sizes.tolist(), strict=True)
        check_cover(name, shape, [Box(tuple(start), tuple(size)) for start, size in pairs])


def _is_grid(shape: Sequence[int], offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> bool:
    """Whether each dim is cut into intervals, and the boxes are all combinations of these."""
    num = len(offsets)
    cell, cells = np.zeros(num, np.int64), 1
    for dim, full in enumerate(shape):
        starts, index = np.unique(offsets[:, dim], return_inverse=True)
        bounds = np.append(starts, full)
        # Each begins where another one ends, so that it is told by its start.
        if starts[0] != 0 or (sizes[:, dim] != np.diff(bounds)[index]).any():
            return False
        cells *= len(starts)
        if cells > num:
            return False
        cell = cell * len(starts) + index
    return cells == num and len(np.unique(cell)) == num


def _fingerprint(offsets: Sequence[int], sizes: Sequence[int]) -> int:
    product = 1
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        product = product * (_power(dim, start + size) - _power(dim, start)) % _PRIME
    return product


@functools.lru_cache(maxsize=4096)
def _power(dim: int, exponent: int) -> int:
    return pow(_POINTS[dim], exponent, _PRIME)


def _overlapping(boxes: Sequence[Box]) -> str:
    """Two that overlap, if they are soon found."""
    pairs = itertools.islice(itertools.combinations(sorted(boxes), 2), 100_000)
    found = next((pair for pair in pairs if intersect(*pair)), None)
    return f"parts {found[0]} and {found[1]}" if found else "some of its parts"


def part(tensor: torch.Tensor, origin: Sequence[int], box: Box) -> torch.Tensor:
    """The view of ``box`` in ``tensor``, whose first element stands at ``origin``."""
    for dim, (start, size, base) in enumerate(zip(*box, origin, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start - base, size)
    return tensor


def is_run(sizes: Sequence[int], within: Sequence[int]) -> bool:
    """Return whether a part of ``sizes`` is unbroken in a contiguous array of ``within``."""
    dims = len(sizes)
    first = next((dim for dim in range(dims) if sizes[dim] != 1), dims)
    return all(sizes[dim] == within[dim] for dim in range(first + 1, dims))
