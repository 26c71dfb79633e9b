"""The run of each rank: a scenario under a strategy, and everything that it leaves to be seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from unipar.data import move_to
from unipar.data.batch import Batch, MicroBatch
from unipar.loss import Loss, LossSum
from unipar.state import Box, TensorState
from unipar.strategy import Engine, StepResult, Strategy
from unipar.testing.reference import Trace
from unipar.testing.scenarios import Scenario
from unipar.utils.garbage_collection import no_collection
from unipar.utils.torch_versions import exact_products
from unipar.world import Placement, World


class Part(NamedTuple):
    """One rank's share of one tensor of an engine's state."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    tensors: list[torch.Tensor]


@dataclass
class Exported:
    """One rank's part of an engine's state, copied."""

    weights: list[Part]
    optimizer: list[Part]
    aliases: dict[str, str]

    @classmethod
    def of(cls, engine: Engine) -> Exported:
        state = engine.export_state()
        return cls(
            [_part(tensor) for tensor in state.weights],
            [_part(tensor) for tensor in state.optimizer],
            dict(state.aliases),
        )


def _part(state: TensorState) -> Part:
    tensors = [tensor.detach().cpu().clone() for tensor in state.read()]
    return Part(state.name, state.shape, state.dtype, state.boxes, tensors)


@dataclass
class RankRun:
    """One rank's view of a run.

    Attributes:
        trace: as in the reference; its weights are left empty.
        samples: the indices of the samples that this rank trained on, step by step.
        state: this rank's part of the engine's state at the end.
        scheduler_steps: how often the scheduler was stepped, or ``None`` without one.
        data_rank: which share of each global batch that is; ranks that hold parts of one replica
            have the same.
    """

    trace: Trace
    state: Exported
    samples: list[list[int]] = field(default_factory=list)
    scheduler_steps: int | None = None
    data_rank: int | None = None


def on_strategy(
    placement: Placement, make: Callable[[], Strategy], fn: Callable[..., Any], args: tuple
) -> Any:
    """Call ``fn(strategy, world, *args)`` between a strategy's setup and teardown."""
    strategy = make()
    with no_collection():
        world = strategy.setup(placement)
    try:
        # What is compared with a CPU's is computed in fp32.
        with exact_products():
            return fn(strategy, world, *args)
    finally:
        strategy.teardown()
        world.leave()


def train_all(strategy: Strategy, world: World, scenarios: tuple[Scenario, ...]) -> list[RankRun]:
    return [train(strategy, world, scenario) for scenario in scenarios]


def train(
    strategy: Strategy, world: World, scenario: Scenario, step: TakeStep | None = None
) -> RankRun:
    """Train under the strategy, by ``train_step`` or by a user's own loop over a step."""
    torch.manual_seed(scenario.seed)
    engine = strategy.prepare(scenario.spec(world.data_size), world)
    try:
        trace, samples = Trace(), []
        for batch in batches(scenario, world):
            trace.lrs.append(learning_rates(engine))
            samples.append(trained_on(batch))
            if step is None:
                record(trace, engine.train_step(batch, scenario.loss))
            else:
                record(trace, step(engine, world, batch, scenario.loss))
            if isinstance(engine.lr_scheduler, ReduceLROnPlateau):
                # As one's own loop does; see the reference.
                engine.lr_scheduler.step(float(len(samples)))
        scheduler = engine.lr_scheduler
        steps = None if scheduler is None else scheduler.last_epoch
        return RankRun(trace, Exported.of(engine), samples, steps, world.data_rank)
    finally:
        engine.close()


def batches(scenario: Scenario, world: World, *, start: int = 0) -> Iterator[Batch]:
    """This rank's share of each global batch of the scenario, epoch after epoch."""
    loader = scenario.loader(world.data_rank, world.data_size)
    step = 0
    while step < scenario.num_steps:
        for batch in loader:
            if step == scenario.num_steps:
                return
            if step >= start:
                yield batch
            step += 1


def learning_rates(engine: Engine) -> tuple[float, ...]:
    assert engine.optimizer is not None
    return tuple(float(group["lr"]) for group in engine.optimizer.param_groups)


def trained_on(batch: Batch, key: str = "index") -> list[int]:
    return [int(i) for m in batch if m.num_samples for i in m.data[key]]


def record(trace: Trace, result: StepResult) -> None:
    trace.losses.append(result.loss)
    trace.num_items.append(float(result.num_items))
    trace.grad_norms.append(result.grad_norm)
    trace.skipped.append(result.skipped)


TakeStep = Callable[[Engine, World, Batch, Callable[[Any, Any], Any]], StepResult]
"""``step(engine, world, batch, loss_fn)``: a user's own loop over the micro-batches of a step."""


def step_by_hand(
    engine: Engine, world: World, batch: Batch, loss_fn: Callable[[Any, Any], Any]
) -> StepResult:
    """Forward and backward pass of one micro-batch after the other."""
    for number, microbatch in enumerate(batch):
        loss = loss_fn(engine, move_to(microbatch.data, world.device))
        if number == 0:
            # Where many loops clear gradients.
            engine.zero_grad()
        backward(engine, loss, microbatch)
    return engine.step()


def step_telling_the_last(
    engine: Engine, world: World, batch: Batch, loss_fn: Callable[[Any, Any], Any]
) -> StepResult:
    """The same, where the loop says which one is the last."""
    add_telling_the_last(engine, world, batch, loss_fn)
    return engine.step()


def add_telling_the_last(
    engine: Engine, world: World, batch: Batch, loss_fn: Callable[[Any, Any], Any]
) -> None:
    """All of that step but its end."""
    for number, microbatch in enumerate(batch, start=1):
        with engine.microbatch(last=number == len(batch)):
            backward(engine, loss_fn(engine, move_to(microbatch.data, world.device)), microbatch)


def step_holding_forwards(
    engine: Engine, world: World, batch: Batch, loss_fn: Callable[[Any, Any], Any]
) -> StepResult:
    """All forward passes before the first backward pass."""
    losses = [loss_fn(engine, move_to(part.data, world.device)) for part in batch]
    for loss, microbatch in zip(losses, batch, strict=True):
        backward(engine, loss, microbatch)
    return engine.step()


def backward(engine: Engine, loss: Loss, microbatch: MicroBatch) -> None:
    """Add a micro-batch's gradients; padding counts nothing."""
    if not isinstance(loss, LossSum):
        engine.backward(loss, num_items=microbatch.num_samples)
    elif microbatch.num_samples:
        engine.backward(loss)
    else:
        engine.backward(LossSum(loss.total * 0.0, 0))
