"""The records of a run's steps, kept where the group of ranks that follows another finds them."""

from __future__ import annotations

import json
import math
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from unipar.callbacks import Callback, RunInfo, RunResult, StepRecord
from unipar.utils.replacing import replacing

Evaluation = tuple[int, dict[str, float]]

_ROW = struct.Struct("<qqddddqdqB")
_SKIPPED, _HAS_NORM, _HAS_LR = 1, 2, 4


class KeptHistory(Callback):
    """Appends each step and each evaluation of a run to files in a directory, on rank 0.

    It is the last callback, so that a step that it knows is a step that all others know.

    Args:
        directory: where the files are; it outlives the processes.

    Attributes:
        began: when the first group of the run began, in seconds since the epoch.
        reached: the last step that any group of the run has taken, or ``None``.
    """

    lags = True

    def __init__(self, directory: Path) -> None:
        self._steps, self._evaluations = directory / "steps.bin", directory / "evaluations.jsonl"
        self._files: list[IO[Any]] = []
        self.began, self.reached = time.time(), None

    def read(self, step: int) -> tuple[list[StepRecord], list[Evaluation]]:
        """The steps and evaluations up to ``step``; later ones, which are repeated, are dropped."""
        records: list[StepRecord] = []
        evaluations: list[Evaluation] = []
        if not self._evaluations.exists():
            self._replace(f"{self.began}\n")
            return records, evaluations
        if self._steps.exists():
            data = self._steps.read_bytes()
            data = data[: len(data) - len(data) % _ROW.size]
            rows = [_record(*values) for values in _ROW.iter_unpack(data)]
            self.reached = rows[-1].step if rows else None
            records = [record for record in rows if record.step <= step]
            os.truncate(self._steps, len(records) * _ROW.size)
        first, *lines = self._evaluations.read_text().split("\n")
        self.began = float(first)
        # What stands after the last end of a line was being written.
        found = [json.loads(line) for line in lines[:-1]]
        evaluations = [(at, metrics) for at, metrics in found if at <= step]
        kept = "".join(json.dumps(evaluation) + "\n" for evaluation in evaluations)
        self._replace(f"{first}\n{kept}")
        return records, evaluations

    def _replace(self, text: str) -> None:
        # A process that is killed meanwhile leaves the one or the other, and no part.
        with replacing(self._evaluations) as partial:
            partial.write_text(text)

    def on_run_start(self, run: RunInfo) -> None:
        # Each row is in the file when the step has ended, whatever becomes of the process.
        self._files = [self._steps.open("ab", 0), self._evaluations.open("a", 1)]

    def on_step_end(self, run: RunInfo, record: StepRecord) -> None:
        self._files[0].write(_row(record))

    def on_evaluate_end(self, run: RunInfo, step: int, metrics: Mapping[str, float]) -> None:
        self._files[1].write(json.dumps([step, dict(metrics)]) + "\n")

    def on_run_end(self, run: RunInfo, result: RunResult | None) -> None:
        while self._files:
            self._files.pop().close()


def _row(record: StepRecord) -> bytes:
    norm, lr = record.grad_norm, record.lr
    flags = _SKIPPED * record.skipped
    flags |= _HAS_NORM * (norm is not None) | _HAS_LR * (lr is not None)
    return _ROW.pack(
        record.step,
        record.epoch,
        record.loss,
        math.nan if norm is None else norm,
        math.nan if lr is None else lr,
        record.num_items,
        record.num_samples,
        record.seconds,
        record.peak_memory,
        flags,
    )


def _record(
    step: int,
    epoch: int,
    loss: float,
    norm: float,
    lr: float,
    num_items: float,
    num_samples: int,
    seconds: float,
    peak_memory: int,
    flags: int,
) -> StepRecord:
    return StepRecord(
        step=step,
        epoch=epoch,
        loss=loss,
        grad_norm=norm if flags & _HAS_NORM else None,
        lr=lr if flags & _HAS_LR else None,
        num_items=num_items,
        num_samples=num_samples,
        seconds=seconds,
        peak_memory=peak_memory,
        skipped=bool(flags & _SKIPPED),
    )
