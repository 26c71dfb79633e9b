"""Records of steps, each made once its step is known to have been taken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from unipar.callbacks import History, StepRecord
from unipar.data.batch import Batch
from unipar.errors import NonFiniteLossError
from unipar.strategy import StepResult
from unipar.utils.devices import peak_memory

log = logging.getLogger("unipar")


@dataclass(frozen=True)
class _Taken:
    """A step that is not yet recorded."""

    step: int
    batch: Batch
    done: StepResult
    lr: Any
    seconds: float


class Recorder:
    """The history of a run's steps, of which the last may still be on the device.

    Args:
        notify: called with each record, once it is in the history.
        device_type: of the device whose memory is looked at.
        every: steps from one look at the memory to the next.
        first: the run's first step, after which the memory is looked at, too.
        last: the run's last step, if it is known, likewise.
        lags: whether a record may wait until the next step has begun; the same on every rank.
        records: of the steps before, which are in the history already.

    Attributes:
        history: the records.
    """

    def __init__(
        self,
        notify: Callable[[StepRecord], None],
        *,
        device_type: str,
        every: int,
        first: int,
        last: int | None,
        lags: bool,
        records: Iterable[StepRecord] = (),
    ) -> None:
        self.history = History(records)
        self._notify, self._device_type, self._lags = notify, device_type, lags
        self._every, self._ends = every, (first, last)
        self._peak_memory = 0
        self._unrecorded: _Taken | None = None
        self.empty = True
        """Whether no step was added yet."""

    def add(self, step: int, batch: Batch, done: StepResult, lr: Any, seconds: float) -> None:
        """Record a step, at once unless its result is still to come.

        Args:
            step: its number.
            batch: what it was taken on.
            done: what it did.
            lr: the learning rate that it was taken with.
            seconds: since the end of the step before it.
        """
        self.empty = False
        self._unrecorded = _Taken(step, batch, done, lr, seconds)
        if not (self._lags and done.waits):
            self.settle()

    def take(self, record: StepRecord) -> None:
        """Record a step that other ranks have taken."""
        self.history.append(record)
        self._notify(record)

    def settle(self) -> None:
        """Record the last step, if it is not yet; waits until it is known to have been taken.

        Raises:
            NonFiniteLossError: it was not.
        """
        if self._unrecorded is not None:
            last, self._unrecorded = self._unrecorded, None
            self._record(last)

    def settle_before(self, error: BaseException) -> None:
        """Record the step before the one that has failed, if it is known to have been taken."""
        last = self._unrecorded
        if last is None or last.done.waits:
            return
        if isinstance(error, NonFiniteLossError) and error.step == last.step:
            return
        try:
            self.settle()
        except NonFiniteLossError:
            # It is the one that has failed; after weights alone were loaded, the engine counts its
            # steps from 0, and the run does not.
            pass
        except Exception:
            log.exception("recording step %d failed while the run was ending", last.step)

    def _record(self, taken: _Taken) -> None:
        step, done, lr = taken.step, taken.done, taken.lr
        if step % self._every == 0 or step in self._ends:
            self._peak_memory = peak_memory(self._device_type)
        record = StepRecord(
            step=step,
            epoch=taken.batch.epoch,
            loss=done.loss,
            grad_norm=done.grad_norm,
            lr=None if lr is None else float(lr),
            num_items=done.num_items,
            num_samples=taken.batch.global_num_samples,
            seconds=taken.seconds,
            peak_memory=self._peak_memory,
            skipped=done.skipped,
        )
        self.history.append(record)
        self._notify(record)
