"""The collectives of one step: seen as they are called, with the tensors that they are given."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unipar.benchmark.records import Traffic

# The operators of torch.distributed by the name that they have in its two namespaces (the one that
# works in place, and the functional one), what the field calls them, and which of their arguments
# is the whole tensor, that all ranks put together or reduce; None: what it returns.
_KINDS: dict[str, tuple[str, int | None]] = {
    "allreduce_": ("all-reduce", 0),
    "allreduce_coalesced_": ("all-reduce", 0),
    "all_reduce": ("all-reduce", 0),
    "all_reduce_": ("all-reduce", 0),
    "all_reduce_coalesced": ("all-reduce", 0),
    "_allgather_base_": ("all-gather", 0),
    "allgather_": ("all-gather", 0),
    "allgather_coalesced_": ("all-gather", 0),
    "allgather_into_tensor_coalesced_": ("all-gather", 0),
    "all_gather_into_tensor": ("all-gather", None),
    "all_gather_into_tensor_out": ("all-gather", None),
    "all_gather_into_tensor_coalesced": ("all-gather", None),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "reduce_scatter_": ("reduce-scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1),
    "reduce_scatter_tensor": ("reduce-scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", 0),
    "alltoall_": ("all-to-all", 1),
    "alltoall_base_": ("all-to-all", 1),
    "all_to_all_single": ("all-to-all", 0),
    "broadcast_": ("broadcast", 0),
    "broadcast": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "send": ("send", 0),
    "recv_": ("receive", 0),
    "recv_any_source_": ("receive", 0),
}
_NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")


@runtime_checkable
class CollectiveWatcher(Protocol):
    """A strategy class whose framework has collectives beside those of ``torch.distributed``."""

    @classmethod
    def watch_collectives(cls, seen: Callable[[str, int], None]) -> AbstractContextManager[None]:
        """Call ``seen`` for each of them that this process starts while the context is entered.

        Args:
            seen: called with a kind (``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``,
                ``"all-to-all"``, ``"broadcast"``) and the bytes of the whole tensor.
        """
        ...


class Collectives(TorchDispatchMode):
    """Counts what goes through ``torch.distributed`` while it is entered.

    What a framework sends by means of its own (:class:`CollectiveWatcher`) is given to :meth:`add`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, list[int]] = defaultdict(list)
        self.told = False
        """Whether a framework sends by means of its own."""

    def add(self, kind: str, size: int) -> None:
        """Count one collective of a framework's own over a tensor of ``size`` bytes."""
        self.told = True
        self._seen[kind].append(size)

    @property
    def traffic(self) -> list[Traffic]:
        """Traffic that was counted, by kind."""
        return [
            Traffic(kind=kind, count=len(sizes), bytes=sum(sizes))
            for kind, sizes in sorted(self._seen.items())
        ]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in _NAMESPACES:
            # torch 2.13, _ops.py, OpOverload.
            name = func._schema.name.partition("::")[2]
            if name in _KINDS:
                kind, place = _KINDS[name]
                self._seen[kind].append(size_of(result if place is None else args[place]))
        return result


def size_of(tensors: Any) -> int:
    """Bytes of all tensors in nested lists and tuples."""
    found = [leaf for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in found)
