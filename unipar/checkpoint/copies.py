"""Copies in host memory of what a rank writes in the background, kept from save to save."""

from __future__ import annotations

import math
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from unipar.checkpoint.commit import Boxes
from unipar.checkpoint.plan import Item, RankPlan
from unipar.utils.host_memory import HostMemory, host_memory
from unipar.world import World

SPARED = 0.1
"""Of a host's memory: what copies leave to everything else."""


class HostCopies:
    """Memory for the data of one save, used by the next one again: new memory costs more to touch.

    Copies of what lies on a GPU are queued there, into pinned memory, behind the work that makes
    the data and before whatever changes them; no host waits.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[int, int, int], torch.Tensor] = {}
        self._copied: Any = None

    def lacking(self, parts: Sequence[RankPlan], *, pinned: bool) -> int:
        """Bytes of a save that there is no memory for yet."""
        bytes_ = 0
        for number, part in enumerate(parts):
            for file, entries in enumerate(part.files):
                for place, entry in enumerate(entries):
                    held = self._held.get((number, file, place))
                    if held is None or held.nbytes != entry.nbytes:
                        bytes_ += _pinned_bytes(entry.nbytes) if pinned else entry.nbytes
        return bytes_

    def take(
        self, parts: Sequence[Boxes], failures: list[str]
    ) -> list[list[tuple[Item, torch.Tensor]]]:
        """Copy the boxes of each part; :meth:`wait` before they are read.

        What there is no memory for goes into ``failures``, and the rest are taken all the same:
        no rank is left waiting in a collective that reads one.
        """
        taken: list[list[tuple[Item, torch.Tensor]]] = []
        for number, boxes in enumerate(parts):
            taken.append([])
            for item, box in boxes:
                try:
                    copy = self._copy((number, item.file, item.entry), box)
                except (MemoryError, RuntimeError) as error:
                    failures.append(f"cannot copy {box.nbytes} bytes to host memory: {error}")
                else:
                    taken[-1].append((item, copy))
        if torch.cuda.is_initialized():
            self._copied = torch.cuda.Event()
            self._copied.record()
        return taken

    def wait(self) -> None:
        """Wait until a GPU has made its copies; the device's later work goes on."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, key: tuple[int, int, int], tensor: torch.Tensor) -> torch.Tensor:
        copy = self._held.get(key)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = self._held[key] = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
            )
        return copy.copy_(tensor.detach(), non_blocking=tensor.is_cuda)


def lacking_room(need: int, world: World) -> str | None:
    """Say on which host there is no room for the ranks' copies; ``None``: on each. Collective.

    Args:
        need: bytes that this rank will take.
        world: the run's processes.
    """
    told = world.gather((_machine(), socket.gethostname(), need, host_memory()))
    hosts: dict[str, list[tuple[str, int, HostMemory]]] = {}
    for machine, *found in told:
        hosts.setdefault(machine, []).append((*found,))
    for ranks in hosts.values():
        wanted = sum(need for _, need, _ in ranks)
        left = min(memory.available - SPARED * memory.total for *_, memory in ranks)
        if wanted and wanted > left:
            available = min(memory.available for *_, memory in ranks)
            return (
                f"a copy of the training state takes {_gib(wanted)} of host {ranks[0][0]}, which "
                f"has {_gib(available)} left"
            )
    return None


def _pinned_bytes(nbytes: int) -> int:
    """What torch takes for a pinned tensor: a power of two."""
    return 1 << math.ceil(math.log2(nbytes)) if nbytes else 0


def _machine() -> str:
    """Whose memory it is; containers of one machine share it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()


def _gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
