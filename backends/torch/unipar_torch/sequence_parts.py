"""Which positions of a sequence each rank along ``cp`` holds, and which tensors of a batch have
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree

from unipar.errors import ConfigError, first_few

POSITIONS, MASK = "position_ids", "attention_mask"
"""What models of transformers call the places of tokens, and which of them are no padding."""


@dataclass(frozen=True)
class Parts:
    """Sequences of one length, divided among ranks.

    A sequence is cut into chunks whose lengths differ by one position at most. In zigzag order rank
    ``r`` of ``n`` holds the chunks ``r`` and ``2n - 1 - r`` of ``2n``: an early one, whose
    positions see few others under a causal mask, and a late one, whose positions see many. So all
    ranks have the same work (https://github.com/zhuzilin/ring-flash-attention). Otherwise each
    holds one chunk of ``n``.

    Attributes:
        length: of the whole sequences, in positions.
        size: the number of ranks.
        rank: of this process among them.
        zigzag: whether each rank holds two chunks.
    """

    length: int
    size: int
    rank: int
    zigzag: bool

    def chunks(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The chunks of a rank, in order: the first position and the length of each."""
        if not self.zigzag:
            return (self._chunk(rank, self.size),)
        count = 2 * self.size
        return self._chunk(rank, count), self._chunk(count - 1 - rank, count)

    def _chunk(self, index: int, count: int) -> tuple[int, int]:
        base, longer = divmod(self.length, count)
        return index * base + min(index, longer), base + (index < longer)

    def length_of(self, rank: int) -> int:
        """How many positions a rank holds."""
        return sum(length for _, length in self.chunks(rank))

    @cached_property
    def own_length(self) -> int:
        return self.length_of(self.rank)

    @cached_property
    def longest(self) -> int:
        """The most positions that a rank holds."""
        return max(self.length_of(rank) for rank in range(self.size))

    def own(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a tensor whose ``dim`` is the sequence."""
        parts = [whole.narrow(dim, start, length) for start, length in self.chunks(self.rank)]
        # Losses take views of labels.
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim)

    def positions(self, device: torch.device) -> torch.Tensor:
        """The places of this rank's positions in the whole, of shape (own length,)."""
        starts = self.chunks(self.rank)
        return torch.cat([torch.arange(at, at + size, device=device) for at, size in starts])


class BatchParts:
    """Finds the tensors of a batch that have the sequence, and divides them.

    Args:
        size: ranks along ``cp``.
        rank: of this process along it.
        zigzag: whether each holds two chunks of a sequence.
        dims: the sequence's dimension of each tensor, by its place in the batch; left out: see
            :meth:`dims_of`.

    Attributes:
        size: ranks along ``cp``.
    """

    def __init__(
        self, size: int, rank: int, *, zigzag: bool, dims: Mapping[str, int] | None = None
    ) -> None:
        self.size, self._rank, self._zigzag = size, rank, zigzag
        self._dims = None if dims is None else dict(dims)

    def parts_of(self, length: int) -> Parts:
        """How sequences of a length are divided."""
        return Parts(length, self.size, self._rank, self._zigzag)

    def dims_of(self, batch: Any) -> tuple[int, dict[str, int]]:
        """The length of the sequences of a batch, and the tensors that have them.

        By default dimension 1 of integer tensors of at least two dimensions is the sequence (token
        ids and labels of shape (batch, sequence)), and dimension 1 of every other tensor of that
        size.

        Returns:
            The length, and the dimension of each tensor by its place in the batch: ``labels``,
            ``0``, ``inputs.tokens``.

        Raises:
            ConfigError: there are none, they have different lengths, or are too short.
        """
        tensors = named_tensors(batch)
        dims = self._by_default(tensors) if self._dims is None else self._as_told(tensors)
        length = tensors[next(iter(dims))].shape[dims[next(iter(dims))]]
        if length < 2 * self.size:
            raise ConfigError(
                f"mesh: cp={self.size} divides each sequence among {self.size} ranks, two chunks "
                f"each, and a batch has sequences of {length} positions. Give at least "
                f"{2 * self.size} (pad them), or set cp to {max(1, length // 2)} or less."
            )
        return length, dims

    def divided(self, batch: Any, length: int, dims: Mapping[str, int]) -> Any:
        """This rank's part of a batch."""
        parts = self.parts_of(length)
        return map_named(batch, lambda name, t: parts.own(t, dims[name]) if name in dims else t)

    def _by_default(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        ids = {n: t for n, t in tensors.items() if t.ndim > 1 and is_integer(t)}
        lengths = {t.shape[1] for t in ids.values()}
        if len(lengths) != 1:
            found = "; ".join(f"'{n}' {list(t.shape)}" for n, t in (ids or tensors).items())
            what = "integer tensors of different lengths" if ids else "no integer tensor"
            raise ConfigError(
                f"mesh: cp={self.size} divides sequences, whose dimension is found by tensors of "
                f"integers (token ids, labels) of shape (batch, sequence), and the batch has {what}"
                f" of at least two dimensions: {found or 'no tensor at all'}. Say which dimension "
                "of which tensor is the sequence: sequence_dims={'input_ids': 1, 'labels': 1}, by "
                "the keys of the batch, or by places ('0', '1') where it is a tuple."
            )
        (length,) = lengths
        return {n: 1 for n, t in tensors.items() if t.ndim > 1 and t.shape[1] == length}

    def _as_told(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        assert self._dims is not None
        dims = {name: dim for name, dim in self._dims.items() if name in tensors}
        if not dims:
            raise ConfigError(
                f"mesh: sequence_dims names {first_few(list(self._dims))}, and the batch has no "
                f"such tensor: {first_few(list(tensors)) or 'none'}. Name keys of the batch, or "
                "places ('0', '1') where it is a tuple."
            )
        lengths = {}
        for name, dim in dims.items():
            if not -tensors[name].ndim <= dim < tensors[name].ndim:
                raise ConfigError(
                    f"mesh: sequence_dims says that the sequence is dimension {dim} of '{name}', "
                    f"whose shape is {list(tensors[name].shape)}. Give one of "
                    f"0 to {tensors[name].ndim - 1}."
                )
            lengths[name] = tensors[name].shape[dim]
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"'{name}' has {length}" for name, length in lengths.items())
            raise ConfigError(
                f"mesh: sequence_dims names tensors whose sequences have different lengths: "
                f"{found}. Only sequences of one length are divided together: leave out of "
                "sequence_dims what is to stay whole."
            )
        return dims


def named_tensors(batch: Any) -> dict[str, torch.Tensor]:
    """The tensors of a batch by their places in it; one that is a tensor itself is ``''``."""
    leaves, _ = _pytree.tree_flatten_with_path(batch)
    return {_name(path): leaf for path, leaf in leaves if isinstance(leaf, torch.Tensor)}


def map_named(batch: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """A batch whose tensors are changed, each by its place."""

    def one(path: Sequence[Any], leaf: Any) -> Any:
        return change(_name(path), leaf) if isinstance(leaf, torch.Tensor) else leaf

    # Not public in torch 2.13 (torch/utils/_pytree.py); transformers has its batches known there.
    return _pytree.tree_map_with_path(one, batch)


def _name(path: Sequence[Any]) -> str:
    return ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)


def is_integer(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are integers, and not truth values."""
    return not tensor.is_floating_point() and tensor.dtype is not torch.bool
