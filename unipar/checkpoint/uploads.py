"""Copying checkpoints to where a URL leads, beside training: each host copies its own files."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from unipar.checkpoint.disks import Disks
from unipar.checkpoint.manifest import MANIFEST
from unipar.checkpoint.names import step_of
from unipar.checkpoint.remote import RemoteDirectory, tried
from unipar.errors import CheckpointError
from unipar.world import World

logger = logging.getLogger("unipar")

_PATIENCE = timedelta(hours=12)
"""How long one host waits for another to copy its part. One that is gone is known at once."""


class Uploads:
    """The checkpoints that are still to be copied, and the thread that does it on each host.

    A checkpoint is copied by the lowest rank of each host, which takes the files on its disk; of
    those that several hosts have, its part. The manifest goes last. What comes in faster than
    it can be copied is passed over, but for the newest.

    Args:
        remote: where to; ``None`` on ranks that copy nothing.
        disks: of the local checkpoints.
        world: the run's processes. Collective where these are on several hosts.
        then: called with each checkpoint's path when it is there, in rank 0's thread.
        freed: called when a local checkpoint is needed here no more, in each host's thread.
    """

    def __init__(
        self,
        remote: RemoteDirectory | None,
        disks: Disks,
        world: World,
        then: Callable[[Path], object],
        freed: Callable[[], object],
    ) -> None:
        self._rank = world.rank
        self._then, self._freed = then, freed
        self._remote = remote
        self._leads = world.rank in disks.leaders
        self._leaders, self._group = disks.leaders, None
        if len(disks.leaders) > 1:
            # Its own: training uses the default one at the same time.
            self._group = dist.new_group(list(disks.leaders), backend="gloo", timeout=_PATIENCE)
        self._changed = threading.Condition()
        self._waiting: list[Path] = []
        self._thread: threading.Thread | None = None
        self._closed = self._gone = self._freeing = False
        self._error: str | None = None

    def add(self, path: Path) -> None:
        """Copy a checkpoint that is complete; in the same order on every rank."""
        if not self._leads:
            return
        with self._changed:
            if self._gone:
                return
            self._waiting.append(path)
            self._changed.notify_all()
        if self._thread is None:
            # What it leaves when it is cut off has no manifest, and the next run removes it.
            self._thread = threading.Thread(target=self._run, name="unipar-upload", daemon=True)
            self._thread.start()

    def waiting(self) -> list[Path]:
        """What this rank has to copy yet, that which it is copying included."""
        with self._changed:
            return list(self._waiting)

    def wait(self) -> None:
        """Wait until all is copied, or given up, and what is needed no more is removed here.

        Raises:
            CheckpointError: the newest is not there.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._freeing)
        if self._error is not None:
            raise CheckpointError(self._error)

    def close(self) -> None:
        """Let the thread end when it has copied what there is; nobody waits for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        assert self._remote is not None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                newest = self._waiting[-1]
            path = newest
            try:
                # The newest that every host has.
                step = min(self._gather(step_of(newest)))
                path = next(one for one in self.waiting() if step_of(one) == step)
                self._error = self._copy(path)
            except Exception as error:
                # Of the group, mostly: another host's process has ended. Nobody may wait for ever
                # for a thread that is gone, whatever it was.
                self._gone = True
                self._error = f"{path.name} was not copied to {self._remote.url}: {error}"
            if self._error is not None and self._rank == 0:
                logger.warning("%s Training goes on; it is kept in %s.", self._error, path.parent)
            with self._changed:
                done = len(self._waiting) if self._gone else self._waiting.index(path) + 1
                del self._waiting[:done]
                self._freeing = True
                self._changed.notify_all()
            try:
                self._freed()
            finally:
                with self._changed:
                    self._freeing = False
                    self._changed.notify_all()
            if self._gone:
                return

    def _copy(self, path: Path) -> str | None:
        """Copy a checkpoint with the other hosts; what went wrong."""
        what, remote = f"Copying {path.name}", self._remote
        assert remote is not None
        names = self._files(path)

        def by_main(act: Callable[[], object]) -> Callable[[], object] | None:
            return act if self._rank == 0 else None

        for act in (
            by_main(lambda: remote.remove(step_of(path))),
            lambda: remote.put(path, names),
            by_main(lambda: remote.put(path, [MANIFEST])),
        ):
            error = None
            try:
                if act is not None:
                    tried(act, what)
            except (CheckpointError, OSError) as failure:
                error = f"{path.name} was not copied: {failure}"
            failed = [text for text in self._gather(error) if text]
            if failed:
                return failed[0]
        if self._rank == 0:
            logger.info("copied %s to %s", path.name, remote.url)
            self._then(path)
        return None

    def _files(self, path: Path) -> list[str]:
        """The files that this rank copies: of what several hosts have, its part."""
        told = self._gather(
            [str(one.relative_to(path)) for one in path.rglob("*") if one.is_file()]
        )
        own: list[str] = []
        for place, name in enumerate(sorted({name for names in told for name in names})):
            have = [rank for rank, names in zip(self._leaders, told, strict=True) if name in names]
            if name != MANIFEST and have[place % len(have)] == self._rank:
                own.append(name)
        return own

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * len(self._leaders)
        dist.all_gather_object(values, value, group=self._group)
        return values
