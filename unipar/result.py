"""What a run returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from unipar.callbacks.base import StepRecord


@dataclass
class RunResult:
    """What came out of a run.

    Attributes:
        metrics: the last training loss as ``train_loss`` and the last evaluation's metrics; those
            of the run until then where this call made no step.
        history: one record for each training step that this call made, in order.
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
    history: list[StepRecord]
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
        """The training loss of each step."""
        return [record.loss for record in self.history]
