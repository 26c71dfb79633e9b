"""Measuring a benchmarked run from inside each of its processes."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from unipar.benchmark.bubble import PassTimes
from unipar.benchmark.load import usage
from unipar.benchmark.memory import Held, counting_saved, held, updates_copies
from unipar.benchmark.overlap import Profile
from unipar.benchmark.records import Memory, Rank, RankRecord
from unipar.benchmark.traffic import Collectives, CollectiveWatcher
from unipar.callbacks import Callback, RunInfo, RunResult, StepRecord
from unipar.engine import StepEngine, TimedSchedule
from unipar.strategy import registry
from unipar.utils.devices import peak_memory

PIPELINED = 5
"""Steps of a pipeline, after the timed ones, whose passes are timed."""
WATCHED = 3
"""Steps after these: one whose collectives are seen, one whose memory is, and one under the
profiler."""


class Meter(Callback):
    """Times steps, then looks closely at a few more, and leaves what it found in a file.

    Nothing but the clock is read during the timed steps.

    Args:
        directory: where each rank leaves its :class:`RankRecord`.
        warmup: steps whose times are discarded.
        steps: steps that are timed.
        data: what is trained on, so that it can be told from what training holds.
        began: when the processes were started, in seconds since the epoch.
        trace: whether each rank also leaves a Chrome trace of the step under the profiler.
        pipeline: whether the strategy has one, of which more steps are looked at.
    """

    every_rank = True

    def __init__(
        self,
        directory: Path,
        *,
        warmup: int,
        steps: int,
        data: Any,
        began: float,
        trace: bool = False,
        pipeline: bool = False,
    ) -> None:
        self.directory, self.data, self.began, self.trace = directory, data, began, trace
        self._timed = range(warmup + 1, warmup + steps + 1)
        self._last = self._timed.stop - 1 + (PIPELINED if pipeline else 0)
        """The one before what is watched closely."""
        self._records: list[StepRecord] = []
        self._ready = self._first = 0.0
        self._resident = 0
        self._held: Held | None = None
        self._copies = self._selective = False
        self._passes: PassTimes | None = None

    @property
    def num_steps(self) -> int:
        """How many steps it takes, all told."""
        return self._last + WATCHED

    def on_run_start(self, run: RunInfo) -> None:
        assert run.engine is not None
        self._strategy = registry.strategy_class(run.strategy)
        self._engine, self._cleanup = run.engine, contextlib.ExitStack()
        self._selective = run.engine.spec.activation_checkpointing == "selective"
        self._collectives, self._saved, self._profile = Collectives(), [0], Profile(run.device)
        if self.trace:
            self._profile.keep(self.directory / f"trace-rank{run.rank}.json.gz")
        if run.device == "cpu":
            self._resident = psutil.Process().memory_info().rss - sum(
                held(self._engine.module, self.data)
            )
            self._used = usage()
        self._ready = time.time()

    def on_step_end(self, run: RunInfo, record: StepRecord) -> None:
        if not self._records:
            self._first = time.time()
        self._records.append(record)
        self._cleanup.close()
        if record.step == self._timed.stop - 1:
            self._peak = peak_memory(run.device)
        if self._timed.stop - 1 <= record.step < self._last:
            self._time_passes(run.device)
        elif record.step == self._last:
            self._watch_collectives()
        elif record.step == self._last + 1:
            self._watch_memory()
        elif record.step == self._last + 2 and (run.world_size > 1 or self.trace):
            self._cleanup.enter_context(self._profile)

    def _time_passes(self, device: str) -> None:
        engine = self._engine
        if isinstance(engine, StepEngine) and isinstance(engine.schedule, TimedSchedule):
            if self._passes is None:
                self._passes = PassTimes(engine.schedule, device, engine.world.data_rank)
            self._cleanup.enter_context(self._passes)

    def _watch_collectives(self) -> None:
        if issubclass(self._strategy, CollectiveWatcher):
            own = self._strategy.watch_collectives(self._collectives.add)
            self._cleanup.enter_context(own)
        self._cleanup.enter_context(self._collectives)

    def _watch_memory(self) -> None:
        def look(*_: Any) -> None:
            now = held(self._engine.module, self.data)
            if self._held is None or sum(now) > sum(self._held):
                self._held, self._copies = now, updates_copies(self._engine.module)

        self._cleanup.callback(register_optimizer_step_pre_hook(look).remove)
        self._saved = self._cleanup.enter_context(counting_saved(self._engine.module))

    def on_run_end(self, run: RunInfo, result: RunResult | None) -> None:
        self._cleanup.close()
        if result is None:
            return
        timed = [record for record in self._records if record.step in self._timed]
        RankRecord(
            rank=self._rank(run, timed),
            losses=[record.loss for record in self._records if record.step < self._timed.stop],
            items=sum(record.num_items for record in timed) / len(timed),
            samples=sum(record.num_samples for record in timed) / len(timed),
            setup_seconds=self._ready - self.began,
            first_step_seconds=self._first - self.began,
            parameters=run.num_parameters,
            optimizer=type(self._engine.optimizer).__name__,
            copies=self._copies,
            usage=usage().since(self._used) if run.device == "cpu" else None,
        ).write(self.directory)

    def _rank(self, run: RunInfo, timed: list[StepRecord]) -> Rank:
        memory = None
        if self._held is not None:
            memory = Memory(
                **self._held._asdict(),
                activations=None if self._selective else self._saved[0],
                peak=self._peak,
                resident=self._resident,
            )
        return Rank(
            rank=run.rank,
            seconds=[record.seconds for record in timed],
            threads=torch.get_num_threads(),
            memory=memory,
            traffic=self._collectives.traffic,
            # The profiler sees nothing of what a framework sends by means of its own.
            overlap=None if self._collectives.told else self._profile.overlap,
            passes=self._passes.read() if self._passes else None,
        )
