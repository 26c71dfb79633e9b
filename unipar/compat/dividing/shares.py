"""Parts of tensors that ranks hold, and whole ones made of them, with gradients.

Ranks that compute one and the same loss of a whole tensor each have its whole gradient. Gradients
of weights are averaged over ranks, so what goes into a rank's part counts as often as there are
ranks, and what comes out of it once.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from unipar.engine.graphs import nodes_behind
from unipar.utils.torch_versions import all_gather

_SENT = {torch.bool: torch.uint8, torch.int16: torch.int32, torch.uint16: torch.int32}


class Shares(NamedTuple):
    """How a dimension is divided among ranks.

    Attributes:
        sizes: of each rank's part, in their order along the dimension.
        rank: this one's place among them.
        group: theirs.
    """

    sizes: tuple[int, ...]
    rank: int
    group: Any

    @classmethod
    def of(cls, length: int, rank: int, size: int, group: Any) -> Shares:
        """As equal parts as there can be."""
        ends = [length * (one + 1) // size for one in range(size)]
        sizes = tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))
        return cls(sizes, rank, group)

    @property
    def begins(self) -> list[int]:
        """Where each rank's part begins."""
        return [sum(self.sizes[:rank]) for rank in range(len(self.sizes))]

    @property
    def begin(self) -> int:
        """Where this rank's part begins."""
        return self.begins[self.rank]

    @property
    def own(self) -> int:
        """The size of this rank's part."""
        return self.sizes[self.rank]

    def times(self, factor: int | Fraction) -> Shares:
        """Of a dimension with so many entries for each one of this one's."""
        return self._replace(sizes=tuple(int(size * factor) for size in self.sizes))


def part_of(whole: torch.Tensor, dim: int, shares: Shares) -> torch.Tensor:
    """This rank's part of a tensor that all have; a view where it needs no gradient.

    The backward pass is collective if it does need one.
    """

    def cut(one: torch.Tensor) -> torch.Tensor:
        return one.narrow(dim, shares.begin, shares.own)

    if not (whole.requires_grad and torch.is_grad_enabled()):
        return cut(whole)
    size = len(shares.sizes)
    return _Exchange.apply(
        whole,
        lambda one: cut(one).clone(),
        lambda grad: _gathered(grad / size, dim, shares, list(range(grad.dim()))),
    )


def whole_of(part: torch.Tensor, dim: int, shares: Shares) -> torch.Tensor:
    """What all ranks' parts make, on each, in the layout that they have. Collective."""
    size, order = len(shares.sizes), layout_of(part)
    return _Exchange.apply(
        part,
        lambda one: _gathered(one, dim, shares, order),
        lambda grad: grad.narrow(dim, shares.begin, shares.own) * size,
    )


def mean_over(value: torch.Tensor, shares: Shares) -> torch.Tensor:
    """The mean over ranks. Collective."""
    return _Mean.apply(value, shares)


def sum_over(value: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum over ranks, each of which goes on with it by itself. Collective, backward too."""

    def reduced(one: torch.Tensor) -> torch.Tensor:
        found = one.clone()
        dist.all_reduce(found, group=group)
        return found

    return _Exchange.apply(value, reduced, reduced)


def comes_of_parts(value: torch.Tensor) -> bool:
    """Whether ranks have computed it of their parts of tensors, so that each has a gradient."""
    names = {f"{kind.__name__}Backward" for kind in (_Exchange, _Mean, _Tie)}
    return any(node.name() in names for node in nodes_behind([value.grad_fn]))


def tied(outputs: list[torch.Tensor], parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Outputs whose backward pass comes through parts of tensors, which others wait for.

    A rank may have made nothing of its parts, whose gradients are put together all the same.
    """
    return list(_Tie.apply(len(outputs), *outputs, *parts)) if parts else outputs


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: int, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.others = len(given) - number
        return tuple(one.view_as(one) for one in given[:number])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, *grads, *[None] * ctx.others


class _Exchange(torch.autograd.Function):
    """Something linear that ranks do together, and what gradients do: each that of the other."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, forth: Any, back: Any) -> torch.Tensor:
        ctx.forth, ctx.back = forth, back
        return forth(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Exchange.apply(grads[0], ctx.back, ctx.forth), None, None


class _Mean(torch.autograd.Function):
    """Its gradient is the same on all ranks, and so is not exchanged."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, shares: Shares) -> torch.Tensor:
        found = value.clone()
        dist.all_reduce(found, group=shares.group)
        return found / len(shares.sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def layout_of(tensor: torch.Tensor) -> list[int]:
    """The dimensions in the order in which they lie in memory, as of images in channels last."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


def _gathered(part: torch.Tensor, dim: int, shares: Shares, order: list[int]) -> torch.Tensor:
    """Parts of all ranks, in memory in an order of dimensions that is the same on all.

    Uneven ones are filled up, for collectives take even ones alone.
    """
    if part.is_complex():
        rows = _gathered(torch.view_as_real(part), dim, shares, [*order, part.dim()])
        return torch.view_as_complex(rows)
    length, most = sum(shares.sizes), max(shares.sizes)
    shape = [*part.shape[:dim], length, *part.shape[dim + 1 :]]
    # Nothing that is a view: scripts change what a model gives in place.
    whole = torch.empty_permuted(shape, order, dtype=part.dtype, device=part.device)
    at = order.index(dim)
    into, sent = (one.permute(*order).movedim(at, 0) for one in (whole, part))
    # Not every backend knows these.
    sent = sent.to(_SENT.get(part.dtype, part.dtype)).contiguous()
    if sent.dtype == part.dtype and into.is_contiguous() and min(shares.sizes) == most:
        all_gather(into, sent, group=shares.group)
        return whole
    if shares.own < most:
        sent = torch.cat([sent, sent.new_zeros((most - shares.own, *sent.shape[1:]))])
    found = sent.new_empty((most * len(shares.sizes), *sent.shape[1:]))
    all_gather(found, sent, group=shares.group)
    rows = zip(found.split(most), into.split(list(shares.sizes)), strict=True)
    for row, place in rows:
        place.copy_(row[: len(place)])
    return whole
