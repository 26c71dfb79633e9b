"""Steps of a pipeline: a batch run by a schedule, its loss counted where the last stage is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from unipar.data.batch import Batch, MicroBatch
from unipar.data.feed import on_device
from unipar.engine.average import LossAverage
from unipar.engine.guard import GradientGuard
from unipar.engine.losses import check_loss_of_rank
from unipar.engine.precision import PrecisionPolicy
from unipar.engine.schedule import Schedule, StageCall, drawing_nothing
from unipar.loss import LossFn, LossSum
from unipar.objective import Objective, require_objective
from unipar.utils.progress_marks import mark
from unipar.world import World


class Pipeline:
    """Runs whole batches through the stages of a model.

    Args:
        schedule: runs the stages of this process.
        world: the joined processes.
        precision: surrounds forward passes, and scales losses.
        average: what losses are added to.
        guard: refuses losses that leave gradients.
    """

    def __init__(
        self,
        schedule: Schedule,
        world: World,
        precision: PrecisionPolicy,
        average: LossAverage,
        guard: GradientGuard,
    ) -> None:
        self.schedule, self._guard = schedule, guard
        self._world, self._precision, self._average = world, precision, average

    def train(self, batch: Batch, loss_fn: LossFn, step: int, fingerprint: int = 0) -> None:
        """Forward and backward passes of a step that has begun, the ``step``-th. Collective.

        Args:
            batch: of all stages.
            loss_fn: an objective.
            step: counted from 1.
            fingerprint: as for :meth:`World.start_reduce_loss`.
        """
        # A stage without the loss adds nothing.
        self._average.add(torch.zeros((), device=self._world.device), 1, 0)
        objective = require_objective(loss_fn)
        calls = [self._call(one, objective, training=True) for one in batch.microbatches]
        mark(step, "forward and backward")
        self.schedule.run(calls, training=True)
        self._average.start(fingerprint)

    def evaluate(self, batch: Batch, loss_fn: LossFn, sums: torch.Tensor) -> None:
        """Set ``sums``, zeros of shape (2,), to the loss and the items of a batch. Collective."""
        objective = require_objective(loss_fn)
        self._average.add(sums[0], 1, 0)
        calls = [self._call(one, objective, training=False) for one in batch.microbatches]
        try:
            self.schedule.run(calls, training=False)
            sums[0], sums[1] = self._average.local()
        finally:
            self._average.clear()
        self.schedule.share(sums)

    def _call(self, microbatch: MicroBatch, objective: Objective, *, training: bool) -> StageCall:
        count, samples = objective.count(microbatch.data), microbatch.num_samples
        moved: list[Any] = []

        def data() -> Any:
            if not moved:
                moved.append(on_device(microbatch, self._world.device))
            return moved[0]

        def inputs() -> tuple[tuple[Any, ...], dict[str, Any]]:
            return drawing_nothing(lambda: objective.arguments(data()), self._world.device)

        def loss(output: Any) -> torch.Tensor:
            marks = self._guard.look()
            found = objective.loss_of(output, data(), count)
            self._guard.compare(marks)
            check_loss_of_rank(found, self._world, training=training)
            if isinstance(found, LossSum):
                total, items = found.total.float(), found.count
            else:
                total, items = found.float() * samples, samples
            if samples:
                self._average.add(total.detach(), 1, items)
            if not training:
                return total
            factor = 1 / self._average.normalizer if samples else 0.0
            return self._precision.scale(total * factor)

        @contextlib.contextmanager
        def computing() -> Iterator[None]:
            with objective.calling(microbatch.data), self._precision.forward():
                yield

        return StageCall(inputs, loss, computing)
