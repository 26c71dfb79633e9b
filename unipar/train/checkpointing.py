"""The schedule of a run's checkpoints: when to save, and what to keep."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from unipar import checkpoint, launch
from unipar.config import CheckpointConfig
from unipar.errors import CheckpointError
from unipar.session import Session
from unipar.world import Flag

log = logging.getLogger("unipar")


class _Copied(NamedTuple):
    """A checkpoint where the URL leads."""

    path: Path
    step: int
    metrics: Mapping[str, float]


class Saver:
    """Saves by the config's schedule, copies to where a URL leads, and removes what is not kept.

    With ``keep_best`` it saves where an evaluation is the best so far, too. Collective where the
    settings name a URL.

    Args:
        directory: where checkpoints are written.
        settings: the schedule.
        session: whose engines are saved.

    Attributes:
        best: metric and mode of ``keep_best`` and the best number so far; ``None``: there is none.

    Raises:
        CheckpointError: what the settings' URL leads to cannot be reached.
    """

    def __init__(self, directory: Path, settings: CheckpointConfig, session: Session) -> None:
        self.directory, self.settings, self.session = directory, settings, session
        self.remote, self._disks = settings.remote, None
        self._there: checkpoint.RemoteDirectory | None = None
        self._uploads: checkpoint.Uploads | None = None
        self._peers: checkpoint.Peers | None = None
        self._known: dict[int, Mapping[str, float]] = {}
        self._freeing = threading.Lock()
        best = settings.keep_best
        self.best: tuple[str, str, float] | None = None
        self._retention = checkpoint.Retention(
            keep_last=settings.keep_last,
            keep_best=(best.metric, best.mode) if best else None,
        )
        self._pending: checkpoint.PendingSave | None = None
        self._copies = checkpoint.HostCopies()
        self._said_short = False
        self._last_time = time.monotonic()
        self._last_step: int | None = None
        self._newest: Path | None = None
        if self.remote is not None:
            self._open(self.remote)

    def _open(self, url: str) -> None:
        world = self.session.world
        self._disks = checkpoint.find_disks(self.directory, world)

        def connect() -> None:
            self._there = checkpoint.RemoteDirectory(url)
            if world.is_main:
                self._there.clear()

        # Other ranks have no part in it, and need not have installed what it takes.
        checkpoint.together(world, connect if world.rank in self._disks.leaders else None)
        self._uploads = checkpoint.Uploads(self._there, self._disks, world, self._thin, self._free)
        if self.settings.peers:
            self._peers = checkpoint.Peers(self.settings.peers, url, self._disks, world)

    def take_over(self, manifest: checkpoint.Manifest) -> bool:
        """Count a checkpoint that the run goes on from as its own, if it lies among them."""
        if manifest.path.parent != self.directory:
            return False
        self._newest, self._last_step = manifest.path, manifest.step
        self._copy_missing(manifest.path)
        return True

    def find_newest(self) -> Path | None:
        """The newest checkpoint of this run, which was handed over since. Collective."""
        world = self.session.world
        self._newest = world.broadcast(checkpoint.newest(self.directory) if world.is_main else None)
        if self._newest is not None:
            self._copy_missing(self._newest)
        return self._newest

    def _copy_missing(self, path: Path) -> None:
        """Copy on what processes before these have left uncopied. Collective."""
        if self._uploads is None:
            return
        known = False
        if self.session.world.is_main:
            assert self._there is not None
            known = checkpoint.step_of(path) in self._there.steps()
        if not self.session.world.broadcast(known):
            self._uploads.add(path)

    def collect(self) -> Path | None:
        """The path of a checkpoint that has become complete: at the same step on every rank."""
        if self._pending is None:
            return None
        if self._pending.done():
            # It is complete once it is on any rank; they learn of it with the next loss.
            self.session.world.raise_flag(Flag.SAVED)
        return self.wait() if self.session.world.take_flag(Flag.SAVED) else None

    def due(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether to :meth:`save` after this step; asked once. The same on every rank.

        Args:
            step: the last one.
            metrics: of an evaluation after it, if there was one.
        """
        every, minutes = self.settings.every_steps, self.settings.every_minutes
        world = self.session.world
        if minutes is not None and time.monotonic() - self._last_time >= 60 * minutes:
            # Clocks differ between ranks: the flag makes them agree at the next step.
            world.raise_flag(Flag.CHECKPOINT)
        asked = world.take_flag(Flag.CHECKPOINT)
        is_best = self._is_best(metrics)
        return asked or is_best or (every is not None and step % every == 0)

    def take_best(self, stored: Any) -> None:
        """Go on from the best of a checkpoint's progress, if that is by the same metric."""
        asked = self.settings.keep_best
        if asked is not None and stored is not None and stored[:2] == [asked.metric, asked.mode]:
            self.best = (asked.metric, asked.mode, float(stored[2]))

    def _is_best(self, metrics: Mapping[str, float]) -> bool:
        asked = self.settings.keep_best
        if asked is None or math.isnan(value := metrics.get(asked.metric, math.nan)):
            return False
        sign = 1 if asked.mode == "min" else -1
        if self.best is not None and sign * value >= sign * self.best[2]:
            return False
        self.best = (asked.metric, asked.mode, value)
        return True

    def save(
        self, step: int, progress: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> Path | None:
        """Save; the path of a checkpoint that has become complete. Collective."""
        complete = self.wait()
        return self._save(step, progress, metrics, self.settings.async_) or complete

    def wait(self) -> Path | None:
        """Wait until what is being written is complete; its path. Collective."""
        if self._pending is None:
            return None
        self._newest = self._pending.wait()
        self._pending = None
        self.session.world.lower_flag(Flag.SAVED)
        return self._newest

    def finish(
        self, step: int, progress: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> Path | None:
        """Save once more if asked to, wait for all writing; the newest checkpoint. Collective."""
        if self.settings.save_final:
            return self.save_now(step, progress, metrics)
        self.wait()
        return self._newest

    def save_now(
        self, step: int, progress: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> Path | None:
        """Save unless this step is saved, and wait for all writing; the newest. Collective."""
        self.wait()
        if self._last_step != step:
            # Nothing goes on meanwhile, so nothing need be copied.
            self._save(step, progress, metrics, False, last=True)
        return self._newest

    def wait_for_copies(self) -> str | None:
        """Wait until checkpoints are where the URL leads; why the newest is not. Collective."""
        if self._uploads is None:
            return None
        launch.mark(self._last_step or 0, f"copying checkpoints to {self.remote}")
        try:
            checkpoint.together(self.session.world, self._end_copies)
        except CheckpointError as error:
            return str(error)
        return None

    def _end_copies(self) -> None:
        assert self._uploads is not None
        self._uploads.wait()
        if self._peers is not None:
            # All is where the URL leads. A save in the background may still be sending.
            checkpoint.wait_for_pending()
            self._peers.release()

    def close(self) -> None:
        """Copy no more. A run that has failed does not wait: it would keep other ranks waiting."""
        if self._uploads is not None:
            self._uploads.close()

    def _save(
        self,
        step: int,
        progress: Mapping[str, Any],
        metrics: Mapping[str, float],
        background: bool | Literal["auto"],
        *,
        last: bool = False,
    ) -> Path | None:
        self._last_time, self._last_step = time.monotonic(), step
        launch.mark(step, "saving a checkpoint")
        what = self.directory, self.session.engines, self.session.world
        about: dict[str, Any] = {
            "step": step,
            "progress": progress,
            "metrics": metrics,
            "strategy": self.session.strategy.name,
            "disks": self._disks.writers if self._disks is not None else (),
        }
        if not background:
            self._newest = checkpoint.save(*what, **about)
            self._written(self._newest, last=last)
            return self._newest
        about |= {"copies": self._copies, "then": self._written}
        if background == "auto":
            saved, short = checkpoint.save_where_room(*what, **about)
            self._say(short)
        else:
            saved = checkpoint.save_async(*what, **about)
        if isinstance(saved, Path):
            self._newest = saved
            return saved
        self._pending = saved
        return None

    def _written(self, path: Path, *, last: bool = False) -> None:
        """Copy a complete checkpoint on, and remove those that need not be kept."""
        if self._uploads is not None:
            self._uploads.add(path)
            # The last is waited for until it is where the URL leads.
            if self._peers is not None and not last:
                self._peers.replicate(path)
            self._free()
        elif self.session.world.is_main:
            self._retention.apply(path.parent, checkpoint.step_of(path))

    def _free(self) -> None:
        """Remove what need not be on this host's disk; in the background."""
        assert self._uploads is not None
        assert self._disks is not None
        rank = self.session.world.rank
        if self._disks.writers[rank] == rank:
            # The thread that has saved and the one that has copied may come at once.
            with self._freeing:
                needed = self._uploads.waiting()
                if self._peers is not None and self._peers.kept is not None:
                    # A host that is lost while the next one is sent leaves this one whole.
                    needed.append(self._peers.kept)
                checkpoint.keep_newest(
                    self.directory, self.settings.keep_local, needed, self._last_step
                )

    def _thin(self, path: Path) -> None:
        """Remove what need not be kept of those that were copied; in the background."""
        assert self._there is not None
        try:
            if self.settings.keep_best is not None:
                self._known[checkpoint.step_of(path)] = checkpoint.read_manifest(path).metrics
            found = [
                _Copied(Path(checkpoint.step_name(step)), step, self._metrics_there(step))
                for step in self._there.steps()
            ]
            for copied in self._retention.surplus(found, checkpoint.step_of(path)):
                self._there.remove(copied.step)
        except CheckpointError as error:
            log.error("cannot remove old checkpoints: %s", error)

    def _metrics_there(self, step: int) -> Mapping[str, float]:
        assert self._there is not None
        if step not in self._known and self.settings.keep_best is not None:
            self._known[step] = self._there.manifest(step).metrics
        return self._known.get(step, {})

    def _say(self, short: str | None) -> None:
        """Say once that training waits for saves."""
        if short is not None and not self._said_short and self.session.world.is_main:
            log.warning(
                "training waits while checkpoints are written: %s. "
                "checkpoint.async=true saves in the background all the same, false never does",
                short,
            )
        self._said_short |= short is not None
