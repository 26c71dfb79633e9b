"""Steps that must not be taken, and runs that must come out alike."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from unipar.data import move_to
from unipar.data.batch import Batch
from unipar.errors import ConfigError, NonFiniteLossError
from unipar.loss import Loss, LossSum
from unipar.strategy import Engine, LossScale, StepResult, Strategy
from unipar.testing import models
from unipar.testing.cases.case import case, case_also_at
from unipar.testing.cases.numbers import PLAIN, SHORT_CLIPPED_TOKENS, SHORT_TOKENS
from unipar.testing.compare import assemble, assemble_weights, assert_equal_weights
from unipar.testing.harness import Exported, batches, learning_rates, train
from unipar.testing.kit import Kit, merge
from unipar.testing.scenarios import (
    AN_EPOCH_AND_MORE,
    NUM_SAMPLES,
    Scenario,
    sgd,
    warmup_and_decay,
    watched,
)
from unipar.world import World

POISONED = Scenario(
    data=partial(models.poisoned_points, NUM_SAMPLES, 41),
    scheduler=warmup_and_decay,
    num_steps=AN_EPOCH_AND_MORE,
)
"""One sample in 66 is not a number: it is in one batch of each epoch of five, on one rank."""


def _bad_batches(scenario: Scenario) -> frozenset[int]:
    return frozenset(step for step, indices in enumerate(scenario.order()) if 41 in indices)


@case_also_at(4, in_brief=False)
def repeats_itself(kit: Kit) -> None:
    """The same run twice gives the same bits: losses, norms, weights and moments."""
    both = [SHORT_TOKENS, SHORT_CLIPPED_TOKENS]
    scenarios = [scenario for scenario in both if not kit.refuses(scenario)]
    first = kit.train(*scenarios)
    second = kit.train_again(*scenarios)
    for one, other in zip(first, second, strict=True):
        for what in ("losses", "grad_norms"):
            values = getattr(one.trace, what), getattr(other.trace, what)
            if values[0] != values[1]:
                raise AssertionError(
                    f"{kit.target.name}: the same run twice gave other {what}: "
                    f"{values[0]} and {values[1]}"
                )
        assert_equal_weights(
            other.trace.weights, one.trace.weights, 0.0, subject=f"{kit.target.name}, repeated"
        )
        assert_equal_weights(
            other.optimizer, one.optimizer, 0.0, subject=f"{kit.target.name}, moments repeated"
        )


@case
def stops_at_a_loss_that_is_not_finite(kit: Kit) -> None:
    """``on_nan="raise"`` raises on every rank, names the step, and leaves everything as it was."""
    bad = min(_bad_batches(POISONED))
    results = kit.run(_run_into_nan, kit.fit(POISONED))
    for rank, (step, _, _, rates) in enumerate(results):
        if step != bad + 1:
            raise AssertionError(f"rank {rank} stopped at step {step}; the bad one is {bad + 1}")
        if rates[0] != rates[1]:
            raise AssertionError(f"rank {rank}: a step that was not taken moved the learning rate")
    before, after = [r[1] for r in results], [r[2] for r in results]
    assert_equal_weights(assemble_weights(after), assemble_weights(before), 0.0)
    assert_equal_weights(
        assemble([e.optimizer for e in after]), assemble([e.optimizer for e in before]), 0.0
    )


def _run_into_nan(
    strategy: Strategy, world: World, scenario: Scenario
) -> tuple[int | None, Exported, Exported, tuple[Any, Any]]:
    engine = strategy.prepare(scenario.spec(world.data_size), world)
    before, rates = Exported.of(engine), learning_rates(engine)
    for batch in batches(scenario, world):
        try:
            engine.train_step(batch, scenario.loss)
        except NonFiniteLossError as error:
            return error.step, before, Exported.of(engine), (rates, learning_rates(engine))
        before, rates = Exported.of(engine), learning_rates(engine)
    return None, before, before, (rates, rates)


@case
def skips_a_loss_that_is_not_finite(kit: Kit) -> None:
    """``on_nan="skip"`` goes on, on every rank, as if the batch had not been there."""
    scenario = replace(POISONED, on_nan="skip", leave_out=_bad_batches(POISONED))
    scenarios = [scenario, replace(scenario, accumulation=2, max_grad_norm=0.5, optimizer=sgd)]
    scenarios = [s for s in scenarios if not kit.refuses(s)]
    for run, asked in zip(kit.train(*scenarios), scenarios, strict=True):
        kit.check(run, asked, subject=f"{kit.target.name}, skipping")


@case
def drops_a_step_that_failed(kit: Kit) -> None:
    """What a step has left that failed, or was given up, is not added to the next one's."""
    scenario = replace(PLAIN, accumulation=2, num_steps=3)
    # An error of the last stage's leaves the others of a pipeline waiting.
    if kit.refuses(scenario) or kit.capabilities.pipeline:
        return
    steps = [_fail_at_first]
    if kit.capabilities.custom_loop:
        steps += [_give_up_at_first, _fail_in_backward_at_first]
    for step in steps:
        try:
            run = merge(kit.run(train, kit.fit(scenario), step))
        except ConfigError:
            # A framework may be unable to go on after half a backward pass, if it says so.
            if step is _fail_in_backward_at_first:
                continue
            raise
        kit.check(run, scenario, subject=f"{kit.target.name}, after steps that failed")


class _FailedError(Exception):
    """Of a user's loss function."""


def _failing(loss_fn: Any, at: int, *, in_backward: bool = False) -> Any:
    """The loss function, which fails when it is called for the ``at``-th time."""
    calls = 0

    def failing(model: Any, data: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < at:
            return loss_fn(model, data)
        if at == 1:
            # Before the model is called.
            raise _FailedError
        loss = loss_fn(model, data)
        if in_backward:
            return _FailsInBackward.apply(loss)
        raise _FailedError

    return failing


def _fail_at_first(engine: Engine, world: World, batch: Batch, loss_fn: Any) -> StepResult:
    for at in (1, 2):
        with contextlib.suppress(_FailedError):
            engine.train_step(batch, _failing(loss_fn, at))
    return engine.train_step(batch, loss_fn)


def _by_hand(
    engine: Engine, world: World, batch: Batch, loss_fn: Any, failing: int | None = None
) -> None:
    for number, part in enumerate(batch):
        loss = loss_fn(engine, move_to(part.data, world.device))
        if number == failing:
            loss = _FailsInBackward.apply(loss)
        engine.backward(loss, num_items=part.num_samples)  # pyright: ignore[reportArgumentType]


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor) -> torch.Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise _FailedError


def _give_up_at_first(engine: Engine, world: World, batch: Batch, loss_fn: Any) -> StepResult:
    _by_hand(engine, world, batch, loss_fn)
    engine.zero_grad()
    _by_hand(engine, world, batch, loss_fn)
    return engine.step()


def _fail_in_backward_at_first(
    engine: Engine, world: World, batch: Batch, loss_fn: Any
) -> StepResult:
    with contextlib.suppress(_FailedError):
        _by_hand(engine, world, batch, loss_fn, failing=1)
    try:
        engine.step()
    except ConfigError:
        engine.zero_grad()
    else:
        raise AssertionError("a step was taken after a backward pass that had failed")
    last = len(batch.microbatches)
    with contextlib.suppress(_FailedError):
        engine.train_step(batch, _failing(loss_fn, last, in_backward=True))
    return engine.train_step(batch, loss_fn)


@case
def skips_overflow(kit: Kit) -> None:
    """A step whose fp16 gradients overflow is skipped, and moves neither weights nor schedule.

    And the loss scale begins and changes as it is asked to.
    """
    scenario = kit.fit(Scenario(precision="fp16", scheduler=warmup_and_decay, num_steps=4))
    if kit.refuses(scenario):
        return
    for rank, (results, before, after, rates, scales) in enumerate(kit.run(_overflow, scenario)):
        if scales != [1024.0, 256.0, 768.0]:
            raise AssertionError(
                f"rank {rank}: the scale at first, and after each of both steps, was {scales}"
            )
        if results != [True, False]:
            raise AssertionError(
                f"rank {rank}: of an overflowing and a usual step, skipped was {results}"
            )
        if rates[0] != rates[1]:
            raise AssertionError(f"rank {rank}: a skipped step moved the learning rate")
        assert_equal_weights(
            {p.name: p.tensors[0] for p in after.weights if p.tensors},
            {p.name: p.tensors[0] for p in before.weights if p.tensors},
            0.0,
            subject=f"{kit.target.name}, rank {rank}, skipped",
        )


def _enlarged(loss: Loss) -> Loss:
    if isinstance(loss, LossSum):
        return LossSum(loss.total * 1e30, loss.count)
    return loss * 1e30


def _overflow(
    strategy: Strategy, world: World, scenario: Scenario
) -> tuple[list[bool], Exported, Exported, tuple[Any, Any], list[float]]:
    asked = LossScale(initial=1024, growth_factor=3, backoff_factor=0.25, growth_interval=1)
    spec = replace(scenario.spec(world.data_size), loss_scale=asked)
    engine = strategy.prepare(spec, world)
    stream = batches(scenario, world)
    before, rates = Exported.of(engine), learning_rates(engine)
    scales = [_scale_of(engine)]

    # Finite in the forward pass; its gradient is infinite in fp16 once the scaler is through.
    huge = watched(scenario.loss, lambda: None, _enlarged)
    overflowed = engine.train_step(next(stream), huge)
    after, later = Exported.of(engine), learning_rates(engine)
    scales.append(_scale_of(engine))
    usual = engine.train_step(next(stream), scenario.loss)
    scales.append(_scale_of(engine))
    engine.close()
    return [overflowed.skipped, usual.skipped], before, after, (rates, later), scales


def _scale_of(engine: Engine) -> float:
    return engine.export_state().extra["scaler"]["scale"]
