"""The training step under HybridParallelPlugin with a pipeline: a step is a whole schedule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from colossalai.pipeline.schedule import (  # pyright: ignore[reportMissingImports]
    OneForwardOneBackwardSchedule,
)

from unipar.batch import Batch, MicroBatch
from unipar.data import move_to
from unipar.errors import ConfigError
from unipar.loss import LossFn, LossSum
from unipar.objective import Objective, require_objective
from unipar.strategy import Engine, StepResult
from unipar_colossalai.engine import Start
from unipar_colossalai.hybrid import HybridEngine

Stage = Callable[[MicroBatch, "dict[str, Any] | None"], Any]
"""Runs this rank's stage on a micro-batch and what the stage before has sent."""


class Schedule(OneForwardOneBackwardSchedule):
    """One forward, one backward, over micro-batches as they are given: any number, of any sizes.

    Colossal-AI 0.5.0 (colossalai/pipeline/schedule/one_f_one_b.py) cuts a batch into equal ones,
    and divides the loss by their number.
    """

    def load_batch(self, data_iter: Iterator[MicroBatch], device: Any = None) -> None:
        given = list(data_iter)
        self.num_microbatches = len(given)
        self._given = iter(given)

    def forward_step(
        self,
        model: Any,
        input_obj: dict[str, Any] | None,
        criterion: Stage,
        accum_loss: Any = None,
        outputs: Any = None,
    ) -> Any:
        return criterion(next(self._given), input_obj)


class PipelineEngine(HybridEngine):
    """Each rank holds some of the layers, or a part of each of them; the last stage has the loss.

    How many items a global batch has is known at the end, when the last stage has counted them.
    """

    __call__ = Engine.__call__
    backward = Engine.backward
    step = Engine.step

    def __init__(self, start: Start) -> None:
        plugin = start.booster.plugin
        # Without a cache of shapes, so that micro-batches may be of different lengths.
        plugin.scheduler = Schedule(
            plugin.stage_manager, num_microbatches=1, enable_metadata_cache=False
        )
        self._is_last: bool = plugin.stage_manager.is_last_stage()
        self._last_rank = dist.get_global_rank(plugin.pp_group, plugin.pp_size - 1)
        super().__init__(start)

    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        self._require_optimizer()
        self._enter_training()
        try:
            self._drop_gradients()
            self._total = torch.zeros((), device=self._device)
            self._num_samples = batch.global_num_samples
            self._normalizer = self._expected_items()
            self.booster.execute_pipeline(
                iter(batch.microbatches),
                self.wrapper,
                self._stage(loss_fn, training=True),
                self.framework_optimizer,
                return_loss=False,
            )
            self._start_reduction()
            return self._update()
        except BaseException:
            self._clear()
            raise

    def eval_step(self, microbatch: MicroBatch, loss_fn: LossFn) -> LossSum:
        self._enter_evaluation()
        self._total = torch.zeros((), device=self._device)
        with torch.no_grad():
            self._plugin.scheduler.forward_backward_step(
                self.wrapper, iter([microbatch]), self._stage(loss_fn, training=False)
            )
        values = torch.zeros(2, dtype=torch.float64, device=self._device)
        values[0], values[1] = self._total, self._count
        self._clear()
        dist.broadcast(values, self._last_rank, group=self._plugin.pp_group)
        return LossSum(values[0], values[1])

    def _stage(self, loss_fn: LossFn, *, training: bool) -> Stage:
        objective = require_objective(loss_fn)

        def run(microbatch: MicroBatch, received: dict[str, Any] | None) -> Any:
            count = objective.count(microbatch.data)
            data = move_to(microbatch.data, self._device)
            with torch.autocast(self._device.type, self._dtype, enabled=self._mixed):
                output = self.wrapper(**self._inputs(objective, data), **(received or {}))
            if not self._is_last:
                return output
            samples = microbatch.num_samples

            def of_output(model: Any, data: Any) -> Any:
                return objective.loss_of(output, data, count)

            loss = self._loss(self.module, MicroBatch(data, samples), of_output, training=training)
            total = loss.total if isinstance(loss, LossSum) else loss * samples
            if samples:
                assert self._total is not None
                self._total = self._total + total.detach()
                self._count = self._count + (loss.count if isinstance(loss, LossSum) else samples)
            if not training:
                return total
            total = total * (1 / self._normalizer if samples else 0.0)
            return total if self._scaler is None else self._scaler.scale(total)

        return run

    def _inputs(self, objective: Objective, data: Any) -> dict[str, Any]:
        """What goes into the model, which every stage needs, by the names of its ``forward``.

        Raises:
            ConfigError: it is drawn at random.
        """
        before = torch.get_rng_state()
        args, kwargs = objective.arguments(data)
        if not torch.equal(before, torch.get_rng_state()):
            raise ConfigError(
                "colossalai: the objective's inputs(batch) draws random numbers, and the stages of "
                "a pipeline would draw different ones. Draw them in the dataset, or set pp_size=1."
            )
        # Of the class: Colossal-AI has given the module the forward pass of a stage.
        forward = inspect.signature(type(self.module).forward)
        _, *named = forward.bind_partial(self.module, *args).arguments.items()
        return {**dict(named), **kwargs}
