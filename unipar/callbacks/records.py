"""What is recorded of a run: what is known at its start, of each step, and at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unipar.callbacks.history import History
    from unipar.strategy import Engine


@dataclass(frozen=True)
class RunInfo:
    """What is known of a run before its first step.

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
    engine: Engine | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one training step did, and cost.

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


@dataclass
class RunResult:
    """What came out of a run.

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
