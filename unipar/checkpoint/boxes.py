"""Arithmetic of boxes: the axis-aligned parts that a tensor is divided into."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

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


def check_cover(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Hold that distinct ``boxes`` cover every element of a tensor exactly once.

    Raises:
        CheckpointError: a box leaves the tensor, two overlap, or elements are missing.
    """
    for box in boxes:
        ends = [start + size for start, size in zip(*box, strict=True)]
        if len(box.sizes) != len(shape) or any(
            start < 0 or end > full
            for start, end, full in zip(box.offsets, ends, shape, strict=True)
        ):
            raise CheckpointError(f"Tensor '{name}' of shape {tuple(shape)} has no part {box}.")
    ordered = sorted(boxes)
    for i, box in enumerate(ordered):
        for other in ordered[i + 1 :]:
            # Sorted by the first offset: from here on no box can reach back into this one.
            if box.offsets and other.offsets[0] >= box.offsets[0] + box.sizes[0]:
                break
            if intersect(box, other):
                raise CheckpointError(
                    f"Tensor '{name}' of shape {tuple(shape)}: parts {box} and {other} overlap."
                )
    held, full = sum(map(volume, boxes)), math.prod(shape)
    if held != full:
        raise CheckpointError(
            f"Tensor '{name}' of shape {tuple(shape)}: the ranks hold {held} of its {full} "
            f"elements."
        )


def part(tensor: torch.Tensor, origin: Sequence[int], box: Box) -> torch.Tensor:
    """The view of ``box`` in ``tensor``, whose first element stands at ``origin``."""
    for dim, (start, size, base) in enumerate(zip(*box, origin, strict=True)):
        if size != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start - base, size)
    return tensor


def is_run(sizes: Sequence[int], within: Sequence[int]) -> bool:
    """Whether a part of these ``sizes`` lies unbroken in a contiguous array of ``within``."""
    dims = len(sizes)
    first = next((dim for dim in range(dims) if sizes[dim] != 1), dims)
    return all(sizes[dim] == within[dim] for dim in range(first + 1, dims))
