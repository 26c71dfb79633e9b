"""Where ZeRO's flat partitions hold which elements of which parameter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from unipar.engine import flat_state
from unipar.state import LocalState


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
        return flat_state(
            name, self.shape, self.start, flat[self.offset : self.offset + self.stop - self.start]
        )


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
