"""The records of a run: what is known at its start, of each step, and at its end."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    from unipar.strategy import Engine


@dataclass(frozen=True)
class RunInfo:
    """The facts of a run before its first step.

    Attributes:
        strategy: the strategy's registered name.
        world_size: number of processes.
        device: what they run on: ``"cpu"``, ``"cuda"``, …
        total_steps: the step (1-based) at which the run ends, counted from the very first step
            even when resuming; ``None`` when the data does not say how long it is.
        epochs: number of epochs asked for; ``None`` when the run is counted in steps.
        global_batch_size: samples of a full step over all ranks.
        num_parameters: elements of all parameters of the whole model, each counted once.
        output_dir: where the run's files go.
        start_step: steps already taken when the run begins; 0 unless it resumes.
        config: the resolved config, JSON values.
        rank: the rank that this callback runs on.
        hosts: the host name of each rank, by rank.
        launcher: what has started the processes.
        restart: how many times they have been started again after a failure.
        engine: the model under its strategy, as it is on this rank.
    """

    strategy: str
    world_size: int
    device: str
    total_steps: int | None
    epochs: int | None
    global_batch_size: int
    num_parameters: int
    output_dir: Path
    start_step: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0
    hosts: Sequence[str] = ()
    launcher: str = "local"
    restart: int = 0
    engine: Engine | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The record of one training step, and its cost.

    Attributes:
        step: the step, 1-based, counted over all attempts of the run.
        epoch: the epoch, from 0.
        loss: mean over all items of the global batch, before the update.
        grad_norm: 2-norm of the whole gradient before clipping, where it was computed.
        lr: learning rate of the first parameter group in this step.
        num_items: how many items the loss is a mean over: samples, tokens, …
        num_samples: samples of the global batch.
        seconds: wall time from the end of the last step to the end of this one.
        peak_memory: the most bytes that this rank had held when it was last asked for them: device
            memory, or resident memory on a CPU. ``fit`` asks in the first step, in the last, and
            every ``log_every``.
        skipped: whether the optimizer did not step.
    """

    step: int
    epoch: int
    loss: float
    grad_norm: float | None
    lr: float | None
    num_items: float
    num_samples: int
    seconds: float
    peak_memory: int
    skipped: bool = False

    @property
    def items_per_second(self) -> float:
        """Items of the global batch over the seconds that the step took."""
        return self.num_items / self.seconds if self.seconds > 0 else 0.0


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


@dataclass
class RunResult:
    """The result of a run.

    Attributes:
        metrics: the last training loss as ``train_loss`` and the last evaluation's metrics; those
            of the run until then where this call made no step.
        history: one record for each training step that this call made, in order; after
            more than 10,000 of the newest.
        evaluations: (steps taken by then, metrics) for each evaluation.
        checkpoint: the newest checkpoint: the one that the run went on from where it wrote none
            after it, or ``None``.
        items_per_second: items trained on over the time that the training steps took, without
            evaluation and checkpoints.
        peak_memory: the most bytes each rank has held, by rank.
        wall_time: seconds from the first step to the end.
        output_dir: the run's files: ``metrics.jsonl``, ``config.yaml``, checkpoints.
        world_size: number of processes.
        strategy: the strategy's registered name.
    """

    metrics: dict[str, float]
    history: History
    evaluations: list[tuple[int, dict[str, float]]]
    checkpoint: Path | None
    items_per_second: float
    peak_memory: list[int]
    wall_time: float
    output_dir: Path
    world_size: int = 1
    strategy: str = ""

    @property
    def losses(self) -> list[float]:
        """The training loss of each step that this call made, however many."""
        return self.history.losses
