"""A trace of a few training steps."""

from __future__ import annotations

from typing import Any

import torch

from unipar.callbacks.base import Callback
from unipar.callbacks.records import RunInfo, RunResult, StepRecord
from unipar.errors import ConfigError


class Profiler(Callback):
    """Profiles some steps on every rank with ``torch.profiler``.

    Each rank writes ``profile/rank-N.json.gz`` in the output directory, for Perfetto or
    ``chrome://tracing``.

    Args:
        skip: steps to let pass first, counted from where this run starts or resumes; the first
            ones pay for compilation, allocation and caches.
        steps: number of steps to profile.
        **options: passed to :class:`torch.profiler.profile`: ``record_shapes``, ``with_stack``,
            ``profile_memory``, …

    Raises:
        ConfigError: ``skip`` is negative, or ``steps`` is not positive.
    """

    every_rank = True

    def __init__(self, skip: int = 2, steps: int = 3, **options: Any) -> None:
        if skip < 0 or steps < 1:
            raise ConfigError(
                f"Profiler(skip={skip}, steps={steps}): skip must be at least 0, steps at least 1."
            )
        self.skip, self.steps, self.options = skip, steps, options
        self._profile: torch.profiler.profile | None = None

    def on_run_start(self, run: RunInfo) -> None:
        if self.skip == 0:
            self._start()

    def on_step_end(self, run: RunInfo, record: StepRecord) -> None:
        done = record.step - run.start_step
        if done == self.skip + self.steps:
            self._stop(run)
        elif done == self.skip:
            self._start()

    def on_run_end(self, run: RunInfo, result: RunResult | None) -> None:
        self._stop(run)

    def _start(self) -> None:
        self._profile = torch.profiler.profile(**self.options)
        self._profile.start()

    def _stop(self, run: RunInfo) -> None:
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        profile.stop()
        directory = run.output_dir / "profile"
        directory.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(directory / f"rank-{run.rank}.json.gz"))
