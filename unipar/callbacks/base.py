"""What the training loop tells the outside, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unipar.result import RunResult
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
        peak_memory: the most bytes that this rank has held so far: device memory, or resident
            memory on a CPU.
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


class Callback:
    """Something that watches a run. Every method does nothing unless overridden.

    The methods are called on rank 0; with :attr:`every_rank` on all of them. A callback must not
    make collectives, nor change weights, unless it runs on every rank. What it raises ends the run.

    Attributes:
        every_rank: whether the methods are called on every rank.
    """

    every_rank: bool = False

    def on_run_start(self, run: RunInfo) -> None:
        """Before the first step, when the model is ready."""

    def on_step_end(self, run: RunInfo, record: StepRecord) -> None:
        """After each training step."""

    def on_evaluate_end(self, run: RunInfo, step: int, metrics: Mapping[str, float]) -> None:
        """After each evaluation.

        Args:
            run: the run.
            step: the number of steps taken by then.
            metrics: the evaluation's values by their plain names: ``loss``, ``accuracy``, …
        """

    def on_checkpoint(self, run: RunInfo, step: int, path: Path) -> None:
        """After a checkpoint has been written whole."""

    def on_run_end(self, run: RunInfo, result: RunResult | None) -> None:
        """Last of all, however the run ended; ``result`` is ``None`` when it failed."""

    def on_exception(self, run: RunInfo, error: BaseException) -> None:
        """When the run fails or is interrupted, before :meth:`on_run_end`."""
