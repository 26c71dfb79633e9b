"""Each host's files of a checkpoint, kept in other hosts' memory too, for when one is lost."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unipar.checkpoint.copies import SPARED
from unipar.checkpoint.directory import clean, publish
from unipar.checkpoint.disks import Disks, find_disks
from unipar.checkpoint.files import digest
from unipar.checkpoint.load import agree
from unipar.checkpoint.names import TEMPORARY
from unipar.checkpoint.pieces import Pieces, pieces
from unipar.checkpoint.retention import keep_newest
from unipar.errors import ConfigError
from unipar.utils.host_memory import host_memory
from unipar.world import World

logger = logging.getLogger("unipar")

MEMORY = Path("/dev/shm")
"""Where files are memory, on Linux."""


def memory_of(url: str) -> Path:
    """Where this host keeps other hosts' files of the checkpoints at a URL."""
    return MEMORY / f"unipar-{os.getuid()}-{digest(url.rstrip('/').encode())}"


def kept_for_others(url: str) -> Path | None:
    """That directory, where there is one that nobody but this user can have made."""
    memory = memory_of(url)
    return memory if memory.is_dir() and _is_own(memory) else None


def forget(url: str) -> None:
    """Remove from this host's memory what another run has left for the same URL."""
    memory = kept_for_others(url)
    for path in memory.glob("*") if memory is not None else ():
        shutil.rmtree(path, ignore_errors=True)


class Peers:
    """Copies of what each host has written, in the memory of the hosts after it. Collective.

    As files: memory of a process would be gone with the run. On each disk the lowest rank sends and
    receives.

    Args:
        num: in the memory of how many hosts.
        url: where the checkpoints are copied to.
        disks: of the local checkpoints.
        world: the run's processes.

    Attributes:
        kept: the checkpoint whose files are in other hosts' memory, to be kept on this disk.

    Raises:
        ConfigError: no host could help another.
        CheckpointError: a host's memory cannot be written.
    """

    def __init__(self, num: int, url: str, disks: Disks, world: World) -> None:
        self._hosts = sorted(set(disks.writers))
        check_hosts(num, len(self._hosts), len(disks.leaders))
        self._num, self._rank = num, world.rank
        self._memory = memory_of(url)
        self._takes_part = world.rank in self._hosts
        agree(world, _prepare(self._memory) if self._takes_part else None)
        memories = find_disks(self._memory, world).writers
        if len({memories[host] for host in self._hosts}) < len(self._hosts):
            raise ConfigError(
                f"checkpoint.peers={num} keeps copies in the memory of other hosts, and hosts of "
                f"this run have {MEMORY} in common: they are one machine. Set checkpoint.peers=0."
            )
        timeout = timedelta(seconds=world.placement.timeout)
        # Its own: training and the copies to the URL use others at the same time.
        self._group: Any = dist.new_group(self._hosts, backend="gloo", timeout=timeout)
        self._gone = self._said = False
        self.kept: Path | None = None

    def replicate(self, path: Path) -> None:
        """Send this host's files of a complete checkpoint on, and receive those of others.

        In the same order on every rank; what goes wrong is a warning.
        """
        if not self._takes_part or self._gone:
            return
        try:
            error = self._exchange(path)
        except Exception as failure:
            # Of the group: another host's process has ended. The others find out by it, too.
            self._gone = True
            error = f"{failure}. No more copies are made in this run"
        if error is not None and not self._said and (self._rank == 0 or self._gone):
            logger.warning(
                "%s is not in other hosts' memory: %s. Training goes on; should a host be lost "
                "now, the run that goes on reads the URL",
                path.name,
                error,
            )
        self._said = error is not None

    def _exchange(self, path: Path) -> str | None:
        partial, final = self._memory / f"{TEMPORARY}{path.name}", self._memory / path.name
        moved = Pieces()
        own: dict[str, int] = {}
        with moved.kept(path):
            own = {
                str(one.relative_to(path)): one.stat().st_size
                for one in path.rglob("*")
                if one.is_file()
            }
        told: list[dict[str, int]] = self._gather(own)
        place, hosts = self._hosts.index(self._rank), len(self._hosts)
        before = [(place - shift) % hosts for shift in range(1, self._num + 1)]
        with moved.kept(self._memory):
            self._make_room(sum(sum(told[host].values()) for host in before), partial)
        error = self._first(moved)
        if error is None:
            for shift, host in enumerate(before, 1):
                to = self._hosts[(place + shift) % hosts]
                self._pass_on(path, own, to, self._hosts[host], told[host], partial, moved)
            error = self._first(moved)
        if error is None:
            with moved.kept(final):
                publish(partial, final)
                # Not the newest by name: a run may have gone back.
                keep_newest(self._memory, 0, [final])
            error = self._first(moved)
        if error is None:
            self.kept = path
        shutil.rmtree(partial, ignore_errors=True)
        return error

    def _pass_on(
        self,
        path: Path,
        own: dict[str, int],
        to: int,
        source: int,
        theirs: dict[str, int],
        partial: Path,
        moved: Pieces,
    ) -> None:
        """Send to one host while another one's files come in."""
        have: set[str] = {str(one.relative_to(partial)) for one in partial.rglob("*")}
        for out, come in zip_longest(pieces(own), pieces(theirs)):
            works: list[Any] = []
            piece = torch.empty(0, dtype=torch.uint8)
            if out is not None and out[2]:
                leaving = moved.read(path / out[0], out[1], out[2])
                works.append(dist.isend(leaving, to, group=self._group))
            if come is not None and come[2]:
                piece = torch.empty(come[2], dtype=torch.uint8)
                works.append(dist.irecv(piece, source, group=self._group))
            for work in works:
                work.wait()
            # Each host sends the manifest.
            if come is not None and come[0] not in have:
                moved.take(partial / come[0], piece)

    def _make_room(self, need: int, partial: Path) -> None:
        """Clear the way for so many bytes.

        Raises:
            OSError: there is no room.
        """
        clean(self._memory)
        partial.mkdir()
        if need > _left():
            # What is there is of use only until this checkpoint is whole in its place.
            keep_newest(self._memory, 0, ())
            self.kept = None
        if need > _left():
            raise OSError(
                errno.ENOMEM,
                f"{need / 2**20:.0f} MiB would go there, and host {socket.gethostname()} has "
                f"{max(0, _left()) / 2**20:.0f} MiB of memory to spare",
            )

    def release(self) -> None:
        """Give the memory of this host back."""
        if self._takes_part:
            shutil.rmtree(self._memory, ignore_errors=True)

    def _first(self, moved: Pieces) -> str | None:
        """What went wrong on the first host where something did."""
        return next(filter(None, self._gather(moved.error)), None)

    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * len(self._hosts)
        dist.all_gather_object(values, value, group=self._group)
        return values


def _left() -> float:
    memory = host_memory()
    return min(memory.available - SPARED * memory.total, shutil.disk_usage(MEMORY).free)


def _prepare(memory: Path) -> str | None:
    """Make a directory of this user's alone, where every user may make one."""
    try:
        memory.mkdir(mode=0o700, exist_ok=True)
        own = _is_own(memory)
    except OSError as error:
        return f"checkpoint.peers: {memory} cannot be made: {error.strerror}."
    if not own:
        return f"checkpoint.peers: {memory} is another user's. Have it removed."
    return None


def _is_own(memory: Path) -> bool:
    return not memory.is_symlink() and memory.lstat().st_uid == os.getuid()


def check_hosts(num: int, disks: int, hosts: int) -> None:
    """Refuse copies in the memory of more other hosts than there are with disks of their own.

    Args:
        num: in the memory of how many hosts.
        disks: how many have a disk of their own.
        hosts: how many there are.

    Raises:
        ConfigError: they are too few.
    """
    if num < disks:
        return
    given = f"checkpoint.peers={num} keeps each host's files in the memory of {num} more"
    if hosts == 1:
        raise ConfigError(f"{given}, and this run is on one host. Set checkpoint.peers=0.")
    if disks == 1:
        raise ConfigError(
            f"{given}, and the hosts of this run write to one disk that they share: a host that "
            "is lost takes nothing with it. Set checkpoint.peers=0, or an output_dir on disks of "
            "the hosts' own."
        )
    raise ConfigError(
        f"{given}, and this run has {disks} hosts with disks of their own. Set fewer."
    )
