"""``events.jsonl``: the starts, checkpoints and ends of a run, which its metrics do not say."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from unipar.callbacks import Callback, RunInfo, StepRecord
from unipar.errors import Terminated
from unipar.launch.blame import classify

log = logging.getLogger("unipar")

NAME = "events.jsonl"
FORMAT = 1
"""The version of the file's form, which each line names."""


class EventLog(Callback):
    """Appends one JSON object a line to ``events.jsonl`` in the output directory, on rank 0.

    Each has ``format``, ``event``, ``time`` (seconds since the epoch) and ``step`` (steps taken by
    then). A resumed run, and one that is started again, go on in the same file. A line that cannot
    be written is a warning, once: what trains is not ended by it.

    Args:
        directory: the run's output directory.
        write: whether this process writes; the others do nothing.
        echoes: whether :meth:`ending` notes failures that another rank has brought about.
        step: steps taken until now, if that is known.
    """

    lags = True

    def __init__(
        self, directory: Path, *, write: bool = True, echoes: bool = True, step: int | None = 0
    ) -> None:
        self.path = directory / NAME
        self.ends = True
        """Whether the run ends with :meth:`ending`, and no other ranks go on."""
        self._writes, self._warned, self._step = write, False, step
        self._echoes = echoes

    def on_run_start(self, run: RunInfo) -> None:
        self._step = run.start_step
        self.add(
            "started",
            strategy=run.strategy,
            world_size=run.world_size,
            device=run.device,
            hosts=list(dict.fromkeys(run.hosts)),
            launcher=run.launcher,
            restart=run.restart,
            total_steps=run.total_steps,
        )

    def on_step_end(self, run: RunInfo, record: StepRecord) -> None:
        self._step = record.step

    def on_checkpoint(self, run: RunInfo, step: int, path: Path) -> None:
        self.add("saved", step=step, path=str(path))

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Note how the block ends, which is the run."""
        try:
            yield
        except (KeyboardInterrupt, Terminated) as error:
            self.interrupted(error, self._step)
            raise
        except BaseException as error:
            if self._echoes or not classify(error).is_echo:
                self.failed(error, self._step)
            raise
        if self.ends:
            self.add("ended", how="finished")

    def interrupted(self, error: BaseException, step: int | None) -> None:
        """Note that a signal has ended the run, after ``step`` steps."""
        by = error.signal.name if isinstance(error, Terminated) else "SIGINT"
        self.add("ended", how="interrupted", signal=by, step=step)

    def failed(self, error: BaseException, step: int | None) -> None:
        """Note that the run has failed, after ``step`` steps if that is known."""
        self.add("ended", how="failed", error=_headline(error), step=step)

    def add(self, event: str, **more: Any) -> None:
        """Append a line; it is in the file when this returns."""
        if not self._writes:
            return
        row = {"format": FORMAT, "event": event, "time": round(time.time(), 3), "step": self._step}
        try:
            _append(self.path, json.dumps(row | more))
        except OSError as error:
            if not self._warned:
                log.warning(
                    "%s cannot be written: %s. The run goes on; `unipar runs` will not know all "
                    "of it.",
                    self.path,
                    error.strerror or error,
                )
            self._warned = True


def _headline(error: BaseException) -> str:
    lines = f"{type(error).__name__}: {error}".splitlines()
    first = lines[0][:500]
    return f"another rank failed first, by which: {first}" if classify(error).is_echo else first


def _append(path: Path, line: str) -> None:
    # Not blocking: a pipe of this name would wait for a reader.
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a file")
        size = status.st_size
        # A line that was cut short must not take this one with it.
        cut = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        data = ("\n" if cut else "").encode() + line.encode() + b"\n"
        if os.write(descriptor, data) != len(data):
            raise OSError("no space left for the whole line")
    finally:
        os.close(descriptor)
