"""The schedule of a run's checkpoints: when to save, and what to keep."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unipar import checkpoint, launch
from unipar.config import CheckpointConfig
from unipar.session import Session
from unipar.world import Flag

log = logging.getLogger("unipar")


class Saver:
    """Saves by the config's schedule, and removes what it does not keep.

    Args:
        directory: where checkpoints go.
        settings: the schedule.
        session: whose engines are saved.
    """

    def __init__(self, directory: Path, settings: CheckpointConfig, session: Session) -> None:
        self.directory, self.settings, self.session = directory, settings, session
        best = settings.keep_best
        self._retention = checkpoint.Retention(
            keep_last=settings.keep_last,
            keep_best=(best.metric, best.mode) if best else None,
        )
        self._pending: checkpoint.PendingSave | None = None
        self._last_time = time.monotonic()
        self._last_step: int | None = None
        self._newest: Path | None = None

    def take_over(self, manifest: checkpoint.Manifest) -> bool:
        """Count a checkpoint that the run goes on from as its own, if it lies among them."""
        if manifest.path.parent != self.directory:
            return False
        self._newest, self._last_step = manifest.path, manifest.step
        return True

    def collect(self) -> Path | None:
        """The path of a checkpoint that has become complete. Collective."""
        return self._collect(wait=False)

    def due(self, step: int) -> bool:
        """Return whether to :meth:`save` after this step; asked once. The same on every rank."""
        every, minutes = self.settings.every_steps, self.settings.every_minutes
        world = self.session.world
        if minutes is not None and time.monotonic() - self._last_time >= 60 * minutes:
            # Clocks differ between ranks: the flag makes them agree at the next step.
            world.raise_flag(Flag.CHECKPOINT)
        asked = world.take_flag(Flag.CHECKPOINT)
        return asked or (every is not None and step % every == 0)

    def save(
        self, step: int, progress: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> Path | None:
        """Save; the path of a checkpoint that has become complete. Collective."""
        complete = self.wait()
        return self._save(step, progress, metrics) or complete

    def wait(self) -> Path | None:
        """Wait until what is being written is complete; its path. Collective."""
        return self._collect(wait=True)

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
            self._save(step, progress, metrics)
            self.wait()
        return self._newest

    def _save(
        self, step: int, progress: Mapping[str, Any], metrics: Mapping[str, float]
    ) -> Path | None:
        self._last_time, self._last_step = time.monotonic(), step
        launch.mark(step, "saving a checkpoint")
        save = checkpoint.save_async if self.settings.async_ else checkpoint.save
        saved = save(
            self.directory,
            self.session.engines,
            self.session.world,
            step=step,
            progress=progress,
            metrics=metrics,
            strategy=self.session.strategy.name,
        )
        if isinstance(saved, Path):
            return self._keep(saved)
        self._pending = saved
        return None

    def _collect(self, *, wait: bool) -> Path | None:
        if self._pending is None or not (wait or self._pending.done()):
            return None
        path = self._pending.wait()
        self._pending = None
        return self._keep(path)

    def _keep(self, path: Path) -> Path:
        self._newest = path
        if self.session.world.is_main:
            self._retention.apply(self.directory)
        return path
