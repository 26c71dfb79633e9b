"""Ways to go through the data: a loop of one's own, several models, evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from unipar.errors import ConfigError
from unipar.evaluate import evaluate
from unipar.loss import Loss
from unipar.strategy import EngineSpec, Strategy
from unipar.testing import models, reference
from unipar.testing.cases.case import case, case_also_at
from unipar.testing.cases.numbers import PLAIN, TOKENS
from unipar.testing.compare import assert_equal_runs
from unipar.testing.harness import Exported, RankRun, batches, custom_step, record, train
from unipar.testing.kit import (
    HALF_PRECISION_FACTOR,
    ROUNDINGS,
    TOLERANCE,
    Kit,
    merge,
    merge_all,
)
from unipar.testing.reference import Trace
from unipar.testing.scenarios import HALF_DTYPES, NUM_SAMPLES, Scenario, adamw
from unipar.world import World

GAN = Scenario(data=partial(models.faces, NUM_SAMPLES), max_grad_norm=None, num_steps=7)


@case
def lets_users_loop(kit: Kit) -> None:
    """``backward`` and ``step`` in a loop of one's own make the run that ``train_step`` makes."""
    scenarios = [
        replace(PLAIN, accumulation=4, num_steps=7),
        replace(TOKENS, max_grad_norm=0.5, num_steps=7),
    ]
    if not kit.capabilities.custom_loop:
        kit.run(_refuses_to_be_cut)
        return
    scenarios = [kit.fit(scenario) for scenario in scenarios if not kit.refuses(scenario)]
    for run, scenario in zip(merge_all(kit.run(_train_by_hand, scenarios)), scenarios, strict=True):
        kit.check(run, scenario, subject=f"{kit.target.name}, custom loop")


def _train_by_hand(strategy: Strategy, world: World, scenarios: list[Scenario]) -> list[RankRun]:
    return [train(strategy, world, scenario, custom_loop=True) for scenario in scenarios]


def _refuses_to_be_cut(strategy: Strategy, world: World) -> None:
    engine = strategy.prepare(PLAIN.spec(world.data_size), world)
    for call in (lambda: engine.backward(torch.zeros((), requires_grad=True)), engine.step):
        try:
            call()
        except ConfigError:
            continue
        raise AssertionError("capabilities deny the custom loop, and the engine takes it silently")


@case_also_at(1)
def trains_several_models(kit: Kit) -> None:
    """A small GAN: two engines in turn, each reading the other's model, by both kinds of loop."""
    if not kit.capabilities.several_engines:
        # One engine a session is for the session to hold, and no spec can break it.
        return
    data = GAN.data()
    expected_g, expected_d = reference.train_gan(
        *_gan_models(), [data.batch(indices) for indices in GAN.order()], adamw
    )
    for custom_loop in (False, True) if kit.capabilities.custom_loop else (False,):
        subject = f"{kit.target.name}, GAN by {'backward' if custom_loop else 'train_step'}"
        runs_g, runs_d = zip(*kit.run(_train_gan, custom_loop), strict=True)
        for runs, expected, name in (
            (runs_d, expected_d, "discriminator"),
            (runs_g, expected_g, "generator"),
        ):
            trace = merge(list(runs)).trace
            assert_equal_runs(trace, expected, TOLERANCE, subject=f"{subject}, {name}")


def _gan_models() -> tuple[nn.Module, nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return models.Network(4, 2), models.Network(2, 1)


def _train_gan(strategy: Strategy, world: World, custom_loop: bool) -> tuple[RankRun, RankRun]:
    generator, discriminator = _gan_models()
    g = strategy.prepare(EngineSpec(generator, adamw, name="generator"), world)
    d = strategy.prepare(EngineSpec(discriminator, adamw, name="discriminator"), world)
    trace_g, trace_d = Trace(), Trace()

    def judge(model: Any, batch: Mapping[str, torch.Tensor]) -> Loss:
        with torch.no_grad():
            fake = g.module(batch["noise"])
        on_real, on_fake = model(batch["real"]), model(fake)
        return bce(on_real, torch.ones_like(on_real)) + bce(on_fake, torch.zeros_like(on_fake))

    def deceive(model: Any, batch: Mapping[str, torch.Tensor]) -> Loss:
        judged = d.module(model(batch["noise"]))
        return bce(judged, torch.ones_like(judged))

    for batch in batches(GAN, world):
        for engine, loss_fn, trace in ((d, judge, trace_d), (g, deceive, trace_g)):
            if custom_loop:
                result = custom_step(engine, world, batch, loss_fn)
            else:
                result = engine.train_step(batch, loss_fn)
            record(trace, result)
    result = RankRun(trace_g, Exported.of(g)), RankRun(trace_d, Exported.of(d))
    d.close()
    g.close()
    return result


@case_also_at(4)
def evaluates_every_sample_once(kit: Kit) -> None:
    """Evaluation sums over all samples, padding and ragged batches notwithstanding."""
    for scenario in map(kit.fit, (PLAIN, TOKENS)):
        data = scenario.data()
        total, count = _evaluated(scenario)
        tolerance = _evaluation_tolerance(kit, scenario)
        for rank, (own_total, own_count, mean, modes) in enumerate(kit.run(_evaluate, scenario)):
            if own_count != count:
                raise AssertionError(
                    f"{kit.target.name}: evaluation counted {own_count:g} items, and there are "
                    f"{count:g} in {len(data)} samples"
                )
            for what, value in (("sum", own_total / count), ("mean", mean)):
                if abs(value - total / count) > tolerance * abs(total / count):
                    raise AssertionError(
                        f"{kit.target.name}: the {what} of evaluation losses makes {value} on rank "
                        f"{rank}, and {total / count} over each sample once"
                    )
            if modes != (False, True):
                raise AssertionError(
                    f"rank {rank}: module.training was {modes[0]} in evaluation and {modes[1]} in "
                    "the training step after it"
                )


def _evaluated(
    scenario: Scenario, *, parts: int = 1, half_weights: torch.dtype | None = None
) -> tuple[float, float]:
    data = scenario.data()
    split = np.array_split(np.arange(len(data)), parts)
    batches = [data.batch(part.tolist()) for part in split]
    return reference.evaluate(scenario.build(), batches, scenario.terms, half_weights=half_weights)


def _evaluation_tolerance(kit: Kit, scenario: Scenario) -> float:
    if scenario.precision == "fp32":
        return TOLERANCE
    dtype = HALF_DTYPES[scenario.precision]
    exact = _evaluated(scenario)[0]
    rounded = [_evaluated(scenario, parts=n, half_weights=dtype)[0] for n in ROUNDINGS]
    return HALF_PRECISION_FACTOR * max(abs(total - exact) / abs(exact) for total in rounded)


def _evaluate(
    strategy: Strategy, world: World, scenario: Scenario
) -> tuple[float, float, float, tuple[bool, bool]]:
    engine = strategy.prepare(scenario.spec(world.data_size), world)
    modes: list[bool] = []

    def watched(model: Any, batch: Any) -> Loss:
        modes.append(engine.module.training)
        return scenario.loss(model, batch)

    loader = scenario.loader(world.data_rank, world.data_size, shuffle=False)
    total, count = 0.0, 0.0
    for batch in loader:
        for microbatch in batch:
            part = engine.eval_step(microbatch, watched)
            total, count = total + float(part.total), count + float(part.count)
    evaluating = any(modes)
    shares = world.gather((total, count))
    mean = evaluate(engine, loader, scenario.loss, world)["loss"]
    engine.train_step(next(batches(scenario, world)), watched)
    engine.close()
    return sum(t for t, _ in shares), sum(c for _, c in shares), mean, (evaluating, modes[-1])
