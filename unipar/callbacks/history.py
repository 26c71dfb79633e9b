"""The steps of a run, in memory that does not grow by a record for each."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import overload

from unipar.callbacks.records import StepRecord


class History(Sequence[StepRecord]):
    """The records of the newest steps, in order, and the loss of every one.

    Args:
        records: the first steps.

    Attributes:
        losses: of every step that was added, also of those whose records are gone.
        num_items: items of all steps.
        seconds: of all steps.
    """

    LIMIT = 10_000
    """How many records are kept. What was logged of those before them is in ``metrics.jsonl``."""

    def __init__(self, records: Iterable[StepRecord] = ()) -> None:
        self.num_items = self.seconds = 0.0
        # Eight bytes a step, where a list of numbers takes 32.
        self._losses = array("d")
        self._records: deque[StepRecord] = deque(maxlen=self.LIMIT)
        for record in records:
            self.append(record)

    def append(self, record: StepRecord) -> None:
        """Add the next step."""
        self._losses.append(record.loss)
        self._records.append(record)
        self.num_items += record.num_items
        self.seconds += record.seconds

    @property
    def losses(self) -> list[float]:
        return self._losses.tolist()

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[StepRecord]: ...

    def __getitem__(self, index: int | slice) -> StepRecord | list[StepRecord]:
        if not isinstance(index, slice):
            return self._records[index]
        return list(self._records)[index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History):
            return NotImplemented
        return self._losses == other._losses and self._records == other._records

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __repr__(self) -> str:
        return f"History({len(self._losses)} steps, records of the last {len(self)})"
