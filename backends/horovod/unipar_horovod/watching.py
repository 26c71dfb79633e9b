"""Watching Horovod's own collectives, of which ``torch.distributed`` knows nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

# What every public function of horovod.torch.mpi_ops (0.28.1) goes through: its name there, what
# the field calls it, and which argument is the whole tensor, or the tensors.
_CALLS = {
    "_allreduce_async": ("all-reduce", 0),
    "_grouped_allreduce_async": ("all-reduce", 0),
    "_allgather_async": ("all-gather", 1),
    "_grouped_allgather_async": ("all-gather", 1),
    "_broadcast_async": ("broadcast", 0),
    "_alltoall_async": ("all-to-all", 0),
    "_reducescatter_async": ("reduce-scatter", 0),
    "_grouped_reducescatter_async": ("reduce-scatter", 0),
}


@contextlib.contextmanager
def watching(seen: Callable[[str, int], None]) -> Iterator[None]:
    """Call ``seen(kind, bytes)`` for each collective that is started within the block."""
    from horovod.torch import mpi_ops  # pyright: ignore[reportMissingImports]

    before = {name: getattr(mpi_ops, name) for name in _CALLS}
    for name, (kind, place) in _CALLS.items():
        setattr(mpi_ops, name, _told(before[name], kind, place, seen))
    try:
        yield
    finally:
        for name, call in before.items():
            setattr(mpi_ops, name, call)


def _told(
    call: Callable[..., Any], kind: str, place: int, seen: Callable[[str, int], None]
) -> Callable[..., Any]:
    def told(*args: Any, **kwargs: Any) -> Any:
        given = args[place]
        tensors = [given] if isinstance(given, torch.Tensor) else given
        seen(kind, sum(tensor.numel() * tensor.element_size() for tensor in tensors))
        return call(*args, **kwargs)

    return told
