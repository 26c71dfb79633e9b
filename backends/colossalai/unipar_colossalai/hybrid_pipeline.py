"""HybridParallelPlugin with a pipeline: a step is a whole schedule.

Each rank holds some of the layers, or a part of each of them; the last stage has the loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from colossalai.pipeline.schedule import (  # pyright: ignore[reportMissingImports]
    OneForwardOneBackwardSchedule,
)

from unipar.engine import PassClock, StageCall, bubble_of
from unipar_colossalai.engine import Start

Stage = Callable[[StageCall, "dict[str, Any] | None"], Any]
"""Runs this rank's stage on a micro-batch and what the stage before has sent."""


class GivenMicrobatches(OneForwardOneBackwardSchedule):
    """One forward, one backward, over micro-batches as they are given: any number, of any sizes.

    Colossal-AI 0.5.0 (colossalai/pipeline/schedule/one_f_one_b.py) cuts a batch into equal ones,
    and divides the loss by their number.
    """

    clock: PassClock | None = None

    def run_forward_backward(
        self, model: Any, data_iter: Iterator[StageCall], *args: Any, **kwargs: Any
    ) -> Any:
        calls, run = list(data_iter), super().run_forward_backward
        if self.clock is None:
            return run(model, iter(calls), *args, **kwargs)
        with self.clock.batch(bubble_of(self.stage_manager.num_stages, len(calls), 1)):
            return run(model, iter(calls), *args, **kwargs)

    def load_batch(self, data_iter: Iterator[StageCall], device: Any = None) -> None:
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
        call = next(self._given)
        with nullcontext() if self.clock is None else self.clock.computing():
            return criterion(call, input_obj)

    def backward_step(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.clock is None else self.clock.computing():
            return super().backward_step(*args, **kwargs)


def use_given_microbatches(plugin: Any) -> None:
    """Have the plugin run :class:`GivenMicrobatches`, before it is given a model."""
    # Without a cache of shapes, so that micro-batches may be of different lengths.
    plugin.scheduler = GivenMicrobatches(
        plugin.stage_manager, num_microbatches=1, enable_metadata_cache=False
    )


class PipelineSchedule:
    """Runs this rank's stage as Colossal-AI's schedule asks for it; a :class:`TimedSchedule`.

    Args:
        start: what the engine is made from.
        wrapper: what Colossal-AI has made of the module.
        framework_optimizer: what it has made of the optimizer.
        check_loss: refuses losses, on the last stage.
    """

    def __init__(
        self,
        start: Start,
        wrapper: Any,
        framework_optimizer: Any,
        check_loss: Callable[[torch.Tensor], None],
    ) -> None:
        self.booster, self.wrapper = start.booster, wrapper
        self.framework_optimizer, self._check_loss = framework_optimizer, check_loss
        self._plugin: Any = start.booster.plugin
        self._is_last: bool = self._plugin.stage_manager.is_last_stage()
        self._last_rank = dist.get_global_rank(self._plugin.pp_group, self._plugin.pp_size - 1)
        # Of the class: Colossal-AI has given the module the forward pass of a stage.
        self._module, self._forward = start.module, inspect.signature(type(start.module).forward)

    @property
    def clock(self) -> PassClock | None:
        return self._plugin.scheduler.clock

    @clock.setter
    def clock(self, clock: PassClock | None) -> None:
        self._plugin.scheduler.clock = clock

    def run(self, calls: Sequence[StageCall], *, training: bool) -> None:
        if training:
            self.booster.execute_pipeline(
                iter(calls),
                self.wrapper,
                self._stage,
                self.framework_optimizer,
                return_loss=False,
            )
        else:
            self._plugin.scheduler.forward_backward_step(self.wrapper, iter(calls), self._stage)

    def share(self, values: torch.Tensor) -> None:
        dist.broadcast(values, self._last_rank, group=self._plugin.pp_group)

    def _stage(self, call: StageCall, received: dict[str, Any] | None) -> Any:
        with call.computing():
            output = self.wrapper(**self._named(*call.inputs()), **(received or {}))
            if not self._is_last:
                return output
            loss = call.loss(output)
            self._check_loss(loss)
            return loss

    def _named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """What goes into the model, which every stage needs, by the names of its ``forward``."""
        _, *named = self._forward.bind_partial(self._module, *args).arguments.items()
        return {**dict(named), **kwargs}
