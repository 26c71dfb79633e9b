"""Gradients that hold only the rows of a table that a batch has used."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from unipar.utils.torch_versions import all_gather


def sparse_parameters(module: nn.Module) -> dict[nn.Parameter, str]:
    """The parameters whose gradients are sparse, with their names."""
    sparse = {
        one.weight
        for one in module.modules()
        if isinstance(one, (nn.Embedding, nn.EmbeddingBag)) and one.sparse
    }
    return {p: name for name, p in module.named_parameters() if p in sparse}


_UNUSED = -1
"""In the place of a number of rows: a batch may use none of a table's."""


class SparseSum:
    """A sparse gradient of all ranks, gathered: NCCL sums dense tensors only.

    Args:
        parameter: whose gradient it is.
        own: this rank's; ``None``: it has not used the table. It is sent with each row once, and
            not once for each use: a batch may use more rows than a table has. That waits for the
            device, as the sum does.
        group: over which it is summed.
        wire_dtype: the dtype in which it travels; ``None``: its own, in which rows are summed.

    Attributes:
        used: whether any rank has used the table.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        own: torch.Tensor | None,
        group: Any,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        used = own is not None
        own = (no_rows(parameter) if own is None else own).coalesce()
        self._parameter, self._size, self._dtype = parameter, own.shape, own.dtype
        rows = torch.tensor([len(own.values()) if used else _UNUSED], device="cpu")
        gathered = torch.empty(dist.get_world_size(group), dtype=rows.dtype, device="cpu")
        all_gather(gathered, rows, group=group)
        self.used = bool((gathered != _UNUSED).any())
        self._rows: list[int] = gathered.clamp(min=0).tolist()
        indices, finding = self._gather(own.indices().mT, group)
        self._values, self.work = self._gather(own.values().to(wire_dtype or own.dtype), group)
        finding.wait()
        self._indices = indices

    def _gather(self, own: torch.Tensor, group: Any) -> tuple[torch.Tensor, dist.Work]:
        """The first dimension of all ranks, each filled up to the longest."""
        longest = max(1, *self._rows)
        sent = own.new_zeros(longest, *own.shape[1:])
        sent[: len(own)] = own
        received = own.new_empty(len(self._rows), *sent.shape)
        work = all_gather(received.flatten(0, 1), sent, group=group, async_op=True)
        assert work is not None
        return received, work

    def sum(self) -> torch.Tensor:
        """Of what :attr:`work` has gathered."""
        for received in (self._indices, self._values):
            if received.is_cuda:
                # A callback of the collective runs on a stream of its own.
                received.record_stream(torch.cuda.current_stream(received.device))
        indices, values = (
            torch.cat([part[:rows] for part, rows in zip(parts, self._rows, strict=True)])
            for parts in (self._indices, self._values)
        )
        values = values.to(self._dtype)
        # Said so that PyTorch does not warn.
        made = torch.sparse_coo_tensor(indices.mT, values, self._size, check_invariants=False)
        return made.coalesce()

    def land(self) -> None:
        """Wait for the others', and put the sum in the gradient's place."""
        self.work.wait()
        self._parameter.grad = self.sum()


def no_rows(parameter: nn.Parameter) -> torch.Tensor:
    """A sparse gradient of which no row is used."""
    indices = torch.empty(1, 0, dtype=torch.int64, device=parameter.device)
    values = parameter.new_empty(0, *parameter.shape[1:])
    return torch.sparse_coo_tensor(indices, values, parameter.shape)
