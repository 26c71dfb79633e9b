"""Parameters and buffers that are different tensors in the same memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, pairwise

import torch
from torch import nn


def sharing_memory(module: nn.Module) -> tuple[str, str] | None:
    """The names of two tensors of a module, of which a change of one is a change of the other.

    Such as ``b.weight = nn.Parameter(a.weight.data)``. One tensor under two names is no such pair.
    """
    places: defaultdict[int, list[tuple[int, int, str]]] = defaultdict(list)
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        for storage, start, stop in _extent(tensor):
            places[storage].append((start, stop, name))
    for extents in places.values():
        for (_, stop, first), (start, _, second) in pairwise(sorted(extents)):
            if start < stop:
                return first, second
    return None


def _extent(tensor: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Its storage, and the first and last byte of it there; nothing where it has none."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    if plain and tensor.layout == torch.strided and tensor.numel():
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        length = 1 + sum((int(size) - 1) * int(stride) for size, stride in steps)
        start = int(tensor.storage_offset()) * tensor.itemsize
        # torch 2.13, csrc/Storage.cpp: what tells storages apart, on the meta device too.
        yield tensor.untyped_storage()._cdata, start, start + length * tensor.itemsize
