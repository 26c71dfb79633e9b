"""Batches that are cut up, and what models give that is put together of parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from fractions import Fraction
from typing import Any, NamedTuple

import torch

from unipar.compat.dividing.shares import Shares, part_of
from unipar.data.move import with_items
from unipar.engine.outputs import tensors_of

ALIKE, LOSS = -1, -2
"""Outputs that are the same of a part as of the whole, and numbers that are made of samples."""
PLAIN = (bool, int, float, str)


class Output(NamedTuple):
    """How an output of parts makes that of the whole.

    Attributes:
        dim: along which parts lie; or one of ``ALIKE`` and ``LOSS``.
        each: entries along it for each sample, of which several may have one together.
    """

    dim: int
    each: int | Fraction = 1


class Plan(NamedTuple):
    """How a batch is cut up.

    Attributes:
        inputs: for each tensor of the arguments, and each list of plain values, the dimension that
            samples lie along, if any.
        outputs: for each tensor that the model gives.
        draws_whole: whether ranks draw the random numbers of the whole batch.
        unit: how many samples stay together, as the frames of a clip.
    """

    inputs: tuple[int | None, ...]
    outputs: tuple[Output, ...] = ()
    draws_whole: bool = True
    unit: int = 1


def needs_whole_gradient(leaf: Any, dim: int | None) -> bool:
    return dim is None and isinstance(leaf, torch.Tensor) and leaf.requires_grad


def is_dense(leaf: Any) -> bool:
    return not isinstance(leaf, torch.Tensor) or (
        leaf.layout is torch.strided and not leaf.is_nested
    )


def shape_of(leaf: Any) -> tuple[int, ...]:
    if not is_dense(leaf):
        return (leaf.size(0),)
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else (len(leaf),)


def kind_of(leaf: Any) -> Any:
    return (leaf.dim(), leaf.dtype) if isinstance(leaf, torch.Tensor) else type(leaf)


def leaves_in(data: Any, *, rows: bool = True) -> list[Any]:
    """The tensors in containers, in order, with lists of plain values if these are asked for."""
    found: list[Any] = []

    def note(one: Any) -> Any:
        found.append(one)
        return one

    changed(data, note, rows=rows)
    return found


def tensors_held(data: Any) -> list[torch.Tensor] | None:
    """The tensors in containers, in order; ``None`` if there are others in what is none."""
    return None if closed_in(data) else leaves_in(data, rows=False)


def closed_in(data: Any) -> list[str]:
    """The classes of objects in containers, or of what is none, that have tensors within."""
    items: list[Any] = []
    with_items(data, lambda one: items.append(one) or one)
    if items:
        return [name for one in items for name in closed_in(one)]
    holds = not isinstance(data, torch.Tensor) and any(True for _ in tensors_of(data))
    return [type(data).__name__] if holds else []


def changed(data: Any, change: Callable[[Any], Any], *, rows: bool = False) -> Any:
    row = rows and type(data) in (list, tuple) and bool(data) and all(map(is_plain, data))
    if isinstance(data, torch.Tensor) or row:
        return change(data)
    return with_items(data, lambda one: changed(one, change, rows=rows))


def is_plain(value: Any) -> bool:
    return isinstance(value, PLAIN)


def cut(data: Any, plan: Plan, shares: Shares) -> Any:
    along = iter(plan.inputs)

    def cut(one: Any) -> Any:
        dim = next(along)
        if dim is None:
            return one
        if isinstance(one, torch.Tensor):
            part = part_of(one, dim, shares)
            # A model may view it as it could view the whole.
            return part.contiguous() if one.is_contiguous() else part
        return one[shares.begin : shares.begin + shares.own]

    return changed(data, cut, rows=True)


def with_copies(data: Any, plan: Plan, shares: Shares) -> Any:
    """A batch of whose parts each is the first sample of it, again and again."""
    along = iter(plan.inputs)
    taken = [
        first for first, size in zip(shares.begins, shares.sizes, strict=True) for _ in range(size)
    ]

    def copied(one: Any) -> Any:
        dim = next(along)
        if dim is None:
            return one
        if isinstance(one, torch.Tensor):
            return one.detach().index_select(dim, torch.tensor(taken, device=one.device))
        return type(one)(one[at] for at in taken)

    return changed(data, copied, rows=True)


def along(plan: Plan) -> int | None:
    """The dimension of the first input that samples lie along."""
    return next(dim for dim in plan.inputs if dim is not None)


def rebuilt(data: Any) -> Any:
    """The same with lists and dicts of its own, which may be filled."""
    if isinstance(data, (list, tuple)):
        items = [rebuilt(item) for item in data]
        return type(data)(*items) if hasattr(data, "_fields") else type(data)(items)
    if isinstance(data, MutableMapping):
        made = copy.copy(data)
        made.update({key: rebuilt(item) for key, item in data.items()})
        return made
    return data
