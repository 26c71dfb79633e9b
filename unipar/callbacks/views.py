"""The two ways to show a run: lines in a log, or a bar redrawn in place."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar as Bar
from rich.table import Table
from rich.text import Text

from unipar.callbacks.records import RunInfo, StepRecord
from unipar.callbacks.text import count, duration, memory
from unipar.utils.console import open_console

_PLAIN_SECONDS = 10.0
_REDRAW_SECONDS = 0.2


def open_view(console: Console | None, run: RunInfo) -> View:
    """Begin to show a run on ``console``, or on standard error."""
    console = console or open_console(stderr=True)
    return LiveView(console, run) if console.is_interactive else PlainView(console, run)


class View(ABC):
    """Base of both displays: the numbers since the last one was shown, and their wording."""

    def __init__(self, console: Console, run: RunInfo) -> None:
        self.console, self.run = console, run
        self.record: StepRecord | None = None
        self.shown_step = run.start_step
        self.started = time.monotonic()
        self.next_time = self.started
        self.first_step_at = self.started
        self._items = 0.0
        self._seconds = 0.0
        steps = f"{run.total_steps} steps" if run.total_steps is not None else "training"
        if run.start_step:
            steps += f" from step {run.start_step}"
        self.note(
            f"{run.strategy} on {run.world_size} x {run.device}: "
            f"{count(run.num_parameters)} parameters, {steps} of {run.global_batch_size} samples"
        )

    def step(self, record: StepRecord) -> None:
        now = time.monotonic()
        if self.record is None:
            self.first_step_at = now
        self.record = record
        self._items += record.num_items
        self._seconds += record.seconds
        if now >= self.next_time or self.is_due(record.step):
            self.show(record, now)

    def is_due(self, step: int) -> bool:
        """Return whether a step is shown however little time has passed."""
        return step == self.run.total_steps

    @abstractmethod
    def show(self, record: StepRecord, now: float) -> None:
        """Put the newest record before the reader, and set when to do so next."""

    def note(self, line: str) -> None:
        """Print a line that stays."""
        # As a Text: a console that the user gave would take :bug: in a string for an emoji.
        self.console.print(Text(line), soft_wrap=True)

    def stop(self) -> None:
        """Show the last step, if it has not been, and leave the terminal as it was."""
        record = self.record
        if record is not None and record.step != self.shown_step:
            self.show(record, time.monotonic())

    def where(self, record: StepRecord) -> str:
        """The epoch and the step."""
        run = self.run
        epoch = f"epoch {record.epoch + 1}" + (f"/{run.epochs}" if run.epochs else "")
        return f"{epoch}  step {record.step}" + (f"/{run.total_steps}" if run.total_steps else "")

    def numbers(self, record: StepRecord) -> str:
        """The record's values, with the throughput since they were last asked for."""
        parts = [f"loss {record.loss:.4f}"]
        if record.grad_norm is not None:
            parts.append(f"grad norm {record.grad_norm:.3g}")
        if self._seconds > 0:
            parts.append(f"{count(self._items / self._seconds)} items/s")
        parts.append(f"peak {memory(record.peak_memory)}")
        if record.skipped:
            parts.append("step skipped")
        self._items = self._seconds = 0.0
        self.shown_step = record.step
        return "  ".join(parts)

    def clock(self, record: StepRecord, now: float) -> str:
        """The time gone by, and the time left where the end is known."""
        text = f"{duration(now - self.started)} elapsed"
        # The first step compiles and warms up; leave it out of the estimate.
        done = record.step - self.run.start_step - 1
        if self.run.total_steps is not None and done > 0:
            left = (self.run.total_steps - record.step) * (now - self.first_step_at) / done
            text += f", {duration(left)} left"
        return text


class PlainView(View):
    """A line now and then."""

    def is_due(self, step: int) -> bool:
        total = self.run.total_steps
        return total is not None and (step == total or step % max(1, total // 10) == 0)

    def show(self, record: StepRecord, now: float) -> None:
        self.next_time = now + max(_PLAIN_SECONDS, (now - self.started) / 50)
        line = f"{self.where(record)}  {self.numbers(record)}  {self.clock(record, now)}"
        self.note(line)


class LiveView(View):
    """Two lines that are redrawn in place."""

    def __init__(self, console: Console, run: RunInfo) -> None:
        super().__init__(console, run)
        self._live = Live(
            Text("waiting for the first step"),
            console=console,
            # A thread would take the interpreter from the training loop; steps drive it instead.
            auto_refresh=False,
            # What the script prints to a file must not end up on the terminal.
            redirect_stdout=sys.stdout.isatty(),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start(refresh=True)
        # A process that is killed could not give a hidden cursor back.
        console.show_cursor(True)

    def show(self, record: StepRecord, now: float) -> None:
        top = Table.grid(padding=(0, 2), expand=True)
        top.add_column(no_wrap=True)
        top.add_column(ratio=1)
        top.add_column(no_wrap=True, justify="right")
        total = self.run.total_steps
        bar = Bar(total=total, completed=record.step, pulse=total is None, animation_time=now)
        top.add_row(self.where(record), bar, self.clock(record, now))
        bottom = Text(self.numbers(record), no_wrap=True, overflow="ellipsis", style="cyan")
        self._live.update(Group(top, bottom), refresh=True)
        # However slow the terminal, drawing takes at most about a hundredth of the time.
        cost = time.monotonic() - now
        self.next_time = now + max(_REDRAW_SECONDS, 100 * cost)

    def stop(self) -> None:
        super().stop()
        self._live.stop()
