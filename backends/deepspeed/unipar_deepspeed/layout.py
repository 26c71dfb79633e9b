"""Where ZeRO's flat partitions hold which elements of which parameter."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from unipar.state import Box, LocalState


@dataclass(frozen=True)
class Share:
    """This rank's elements of one trainable parameter, and where its flat partition has them.

    Attributes:
        parameter: the parameter.
        shape: its logical shape, which stage 3 takes from the parameter itself.
        start: first element, in the parameter's own row-major order.
        stop: one past the last; ``start`` where the rank has none.
        flat: number of the flat partition.
        offset: of the first element in that partition.
    """

    parameter: torch.nn.Parameter
    shape: tuple[int, ...]
    start: int
    stop: int
    flat: int
    offset: int

    def state(self, name: str, flat: torch.Tensor) -> LocalState:
        """Describe the share of a tensor laid out as the flat partition is."""
        return elements(
            name, self.shape, self.start, flat[self.offset : self.offset + self.stop - self.start]
        )


def elements(name: str, shape: tuple[int, ...], start: int, held: torch.Tensor) -> LocalState:
    """Describe consecutive elements of a tensor.

    Args:
        name: the tensor's name.
        shape: its logical shape.
        start: the first element, in row-major order.
        held: those elements, one-dimensional.
    """
    boxes = tuple(boxes_of(shape, start, start + held.numel()))
    tensors, at = [], 0
    for box in boxes:
        size = math.prod(box.sizes)
        tensors.append(held[at : at + size].view(box.sizes))
        at += size
    return LocalState(name, shape, held.dtype, boxes, tuple(tensors))


def boxes_of(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The fewest boxes that consecutive elements of a row-major tensor make, in their order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield Box((start,), (stop - start,))
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _in_row(shape, last, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    row = math.prod(shape[1:])
    for box in boxes_of(shape[1:], start - index * row, stop - index * row):
        yield Box((index, *box.offsets), (1, *box.sizes))


def flats(zero: Any) -> list[torch.Tensor]:
    """This rank's flat partitions of the fp32 weights, which the optimizer updates."""
    if is_stage_3(zero):
        return list(zero.fp32_partitioned_groups_flat)
    return list(zero.single_partition_of_fp32_groups)


def shares(zero: Any, rank: int) -> list[Share]:
    """This rank's share of every trainable parameter, in the same order on every rank."""
    return list(_sharded(zero, rank) if is_stage_3(zero) else _replicated(zero, rank))


def is_stage_3(zero: Any) -> bool:
    return hasattr(zero, "fp32_partitioned_groups_flat")


def _replicated(zero: Any, rank: int) -> Iterator[Share]:
    """Stages 1 and 2: a partition is an equal part of all parameters of a group, end to end."""
    for group, parameters in enumerate(zero.round_robin_bit16_groups):
        size = int(zero.partition_size[group])
        begin = rank * size
        for parameter, at in zip(parameters, zero.round_robin_bit16_offsets[group], strict=True):
            start = max(at, begin)
            stop = max(start, min(at + parameter.numel(), begin + size))
            held = stop > start
            yield Share(
                parameter,
                tuple(parameter.shape),
                start - at if held else 0,
                stop - at if held else 0,
                group,
                start - begin if held else 0,
            )


def _sharded(zero: Any, rank: int) -> Iterator[Share]:
    """Stage 3: an equal part of each parameter."""
    for parameters in zero.fp16_groups:
        for parameter in parameters:
            flat, offset, size = zero.grad_position[zero.get_param_id(parameter)]
            start, stop = part(parameter, rank, size)
            yield Share(parameter, tuple(parameter.ds_shape), start, stop, flat, offset)


def part(parameter: Any, rank: int, size: int) -> tuple[int, int]:
    """Which elements of a parameter a rank has in stage 3; padding is left out."""
    total = parameter.ds_numel
    return min(rank * size, total), min((rank + 1) * size, total)
