"""Batches of tensors that hold samples along their first dim, taken of each tensor at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from unipar.data.samples import Pinnable
from unipar.utils.host_copy import to_device


class Columns(Dataset):
    """A map-style dataset of tensors, whose batches are what ``default_collate`` makes of samples.

    One by one, each sample is a view, and a batch a copy of as many: several microseconds a sample.

    Args:
        columns: of one length.
        together: whether a batch is a list of a tensor for each column, as ``default_collate``
            makes of tuples, or the tensor of the only one.
    """

    def __init__(self, columns: Sequence[torch.Tensor], *, together: bool) -> None:
        self._columns, self._together = columns, together

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitems__(self, indices: list[int]) -> Pinnable:
        at = torch.tensor(indices, device="cpu")
        taken = [one.index_select(0, to_device(at, one.device)) for one in self._columns]
        return Pinnable(taken if self._together else taken[0])


def columns_of(dataset: Any) -> Columns | None:
    """Return a dataset of tensors as columns; ``None`` where a batch would not be the same one.

    Only plain tensors are taken, with elements in the order of their dims: stacking samples keeps
    other orders (channels last), and refuses sparse and nested ones.
    """
    if type(dataset) is TensorDataset:
        columns = dataset.tensors
    elif type(dataset) is torch.Tensor:
        columns = (dataset,)
    else:
        return None
    if not all(map(_is_plain, columns)):
        return None
    return Columns(columns, together=type(dataset) is TensorDataset)


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and tensor.is_contiguous()
    )
