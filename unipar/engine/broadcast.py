"""Many tensors sent from rank 0 in few messages, or copied by few kernels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from unipar.world import World

_MESSAGE_BYTES = 2**26


def broadcast_tensors(
    tensors: Iterable[torch.Tensor], world: World, group: dist.ProcessGroup | None = None
) -> None:
    """Give these tensors the values that they have on rank 0, in place. Collective.

    One message for each dtype, device and 64 MiB; a message needs as much memory again.

    Args:
        tensors: whole ones, of the same shapes, dtypes and order on every rank.
        world: the joined processes.
        group: those that take part, whose first one has the values; left out: all.
    """
    if world.size == 1:
        return
    source = 0 if group is None else dist.get_global_rank(group, 0)
    for alike in by_kind(one.detach() for one in tensors if one.numel()):
        for some in in_pieces(alike, _MESSAGE_BYTES):
            _broadcast(some, source, receives=world.rank != source, group=group)


def share_buffers(buffers: Iterable[torch.Tensor], world: World) -> None:
    """Give every rank the buffers of rank 0 (ranks see different batches in BatchNorm). Collective.

    One message for each dtype and device, or several where they are large. As in DDP, a backward
    pass that is to follow may have saved them: it is told of no change.
    """
    broadcast_tensors((one.data for one in buffers), world)


def by_kind(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors by their dtypes and devices: those of one can be copied, or sent, at once."""
    found: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(found.values())


def with_copies(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tensors, each with its copy: of many of a kind they are made by one kernel on a GPU."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for alike in by_kind(one.detach() for one in tensors):
        copies = list(map(torch.empty_like, alike))
        torch._foreach_copy_(copies, alike)  # pyright: ignore[reportPrivateImportUsage]
        found += zip(alike, copies, strict=True)
    return found


def in_pieces(tensors: Iterable[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Runs of tensors that have at most ``limit`` bytes together; a larger one alone."""
    piece: list[torch.Tensor] = []
    filled = 0
    for tensor in tensors:
        if piece and filled + tensor.nbytes > limit:
            yield piece
            piece, filled = [], 0
        piece.append(tensor)
        filled += tensor.nbytes
    if piece:
        yield piece


def _broadcast(
    tensors: list[torch.Tensor], source: int, *, receives: bool, group: dist.ProcessGroup | None
) -> None:
    """One message; of one dtype and device."""
    alone = len(tensors) == 1 and tensors[0].is_contiguous()
    flat = tensors[0].view(-1) if alone else torch.cat([t.reshape(-1) for t in tensors])
    # As bytes: gloo does not know all dtypes.
    dist.broadcast(flat.view(torch.uint8), src=source, group=group)
    if receives and not alone:
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            tensors,
            [
                sent.view(tensor.shape)
                for tensor, sent in zip(
                    tensors, flat.split([t.numel() for t in tensors]), strict=True
                )
            ],
        )
