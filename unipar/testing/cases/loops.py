"""Ways to go through the data: a loop of one's own, several models, evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import cross_entropy

from unipar.data import move_to
from unipar.data.batch import Batch
from unipar.errors import ConfigError
from unipar.evaluation.evaluate import evaluate
from unipar.loss import Loss
from unipar.strategy import Engine, EngineSpec, StepResult, Strategy
from unipar.testing import models, reference
from unipar.testing.cases.case import case, case_also_at
from unipar.testing.cases.numbers import PLAIN, SHORT_TOKENS, TOKENS
from unipar.testing.compare import assert_equal_runs
from unipar.testing.harness import (
    Exported,
    RankRun,
    TakeStep,
    add_telling_the_last,
    backward,
    batches,
    record,
    step_by_hand,
    step_holding_forwards,
    step_telling_the_last,
    train,
)
from unipar.testing.kit import (
    HALF_PRECISION_FACTOR,
    ROUNDINGS,
    TOLERANCE,
    Kit,
    merge,
    merge_all,
)
from unipar.testing.models import Samples
from unipar.testing.reference import Trace
from unipar.testing.scenarios import (
    AN_EPOCH_AND_MORE,
    HALF_DTYPES,
    NUM_SAMPLES,
    Scenario,
    adamw,
    classify,
    of_logits,
    watched,
)
from unipar.world import World

GAN = Scenario(
    data=partial(models.faces, NUM_SAMPLES), max_grad_norm=None, num_steps=5, accumulation=2
)

SHARED = Scenario(max_grad_norm=None, num_steps=5, accumulation=2)


@case
def lets_users_loop(kit: Kit) -> None:
    """``backward`` and ``step`` in a loop of one's own make the run that ``train_step`` makes."""
    scenarios = [
        replace(PLAIN, accumulation=2, num_steps=AN_EPOCH_AND_MORE),
        replace(SHORT_TOKENS, max_grad_norm=0.5),
    ]
    if not kit.capabilities.custom_loop:
        kit.run(_refuses_to_be_cut, kit.fit(PLAIN))
        return
    scenarios = [kit.fit(scenario) for scenario in scenarios if not kit.refuses(scenario)]
    for step, how in ((step_by_hand, "custom loop"), (step_telling_the_last, "told the last")):
        for run, scenario in zip(
            merge_all(kit.run(_train_by_hand, scenarios, step)), scenarios, strict=True
        ):
            kit.check(run, scenario, subject=f"{kit.target.name}, {how}")


@case
def holds_forwards(kit: Kit) -> None:
    """All forward passes of a step before its first backward pass: each gradient counts once.

    A framework that cannot do this refuses it.
    """
    scenarios = [
        replace(PLAIN, accumulation=2, num_steps=AN_EPOCH_AND_MORE),
        replace(SHORT_TOKENS, accumulation=2),
    ]
    if not kit.capabilities.custom_loop:
        return
    scenarios = [kit.fit(scenario) for scenario in scenarios if not kit.refuses(scenario)]
    ranks = kit.run(_or_refusal, _train_by_hand, scenarios, step_holding_forwards)
    if refusals := [said for said in ranks if isinstance(said, str)]:
        assert_refusals(kit, ranks, refusals, "microbatch")
        return
    for run, scenario in zip(merge_all(ranks), scenarios, strict=True):
        kit.check(run, scenario, subject=f"{kit.target.name}, forwards held")


def _train_by_hand(
    strategy: Strategy, world: World, scenarios: list[Scenario], step: TakeStep
) -> list[RankRun]:
    return [train(strategy, world, scenario, step) for scenario in scenarios]


def _or_refusal(strategy: Strategy, world: World, fn: Any, *args: Any) -> Any:
    """Return what ``fn`` returns on this rank, or what it refuses with."""
    try:
        return fn(strategy, world, *args)
    except ConfigError as error:
        return str(error)


def assert_refusals(kit: Kit, ranks: list[Any], refusals: list[str], named: str) -> None:
    """Assert that every rank has refused, and has named what."""
    if len(refusals) < len(ranks):
        raise AssertionError(
            f"{kit.target.name}: {len(refusals)} of {len(ranks)} ranks refuse, and the others "
            f"train: {refusals[0]}"
        )
    for said in refusals:
        if named not in said:
            raise AssertionError(f"{kit.target.name}: the refusal does not name {named!r}: {said}")


def _resist(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    """Classify points that were moved to where the model gives more."""
    x = batch["x"].detach().requires_grad_(True)
    (grad,) = torch.autograd.grad(model(x).square().sum(), x)
    return classify(model, {**batch, "x": (x + 0.1 * grad).detach()})


def _weigh(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    """Classify, each point weighed by how much the model's output depends on it."""
    x = batch["x"].detach().requires_grad_(True)
    logits = model(x)
    (grad,) = torch.autograd.grad(logits.square().sum(), x, retain_graph=True)
    terms = cross_entropy(logits, batch["y"], reduction="none") * grad.square().mean(dim=1)
    return terms.sum(), len(batch["y"])


def _smooth(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    """Classify, with a penalty on the gradient of the model."""
    x = batch["x"].detach().requires_grad_(True)
    logits = model(x)
    (grad,) = torch.autograd.grad(logits.square().sum(), x, create_graph=True)
    total = cross_entropy(logits, batch["y"], reduction="sum") + grad.square().sum()
    return total, len(batch["y"])


@case
def lets_losses_differentiate(kit: Kit) -> None:
    """Losses that take a gradient of the model before the engine does.

    A framework that cannot do this refuses it.
    """
    if kit.capabilities.pipeline:
        # Its losses are given what the model has computed, and not the model.
        return
    for terms in (_resist, _weigh, _smooth):
        scenario = kit.fit(replace(PLAIN, terms=terms, num_steps=AN_EPOCH_AND_MORE))
        ranks = kit.run(_or_refusal, train, scenario)
        if refusals := [said for said in ranks if isinstance(said, str)]:
            assert_refusals(kit, ranks, refusals, "gradient")
        else:
            kit.check(merge(ranks), scenario, subject=f"{kit.target.name}, {terms.__doc__}")


@case
def loses_no_change_of_weights(kit: Kit) -> None:
    """A model that changes weights in its forward pass trains on what it has changed.

    Where frameworks compute with copies, that is an error.
    """
    # An error of one stage's leaves the others of a pipeline waiting.
    if kit.capabilities.pipeline:
        return
    scenario = kit.fit(replace(PLAIN, model=models.Clamped, num_steps=AN_EPOCH_AND_MORE))
    ranks = kit.run(or_error, train, scenario)
    if errors := [said for said in ranks if isinstance(said, str)]:
        assert_refusals(kit, ranks, errors, "")
    else:
        kit.check(merge(ranks), scenario, subject=f"{kit.target.name}, weights clamped")


def or_error(strategy: Strategy, world: World, fn: Any, *args: Any) -> Any:
    try:
        return fn(strategy, world, *args)
    except (ConfigError, RuntimeError) as error:
        return str(error)


@case
def guards_gradients(kit: Kit) -> None:
    """Gradients that are clipped by hand before ``step`` are refused.

    They are neither reduced nor divided yet, or not there at all.
    """
    if not kit.capabilities.custom_loop:
        return
    scenario = kit.fit(replace(PLAIN, max_grad_norm=None, num_steps=1))
    for rank, said in enumerate(kit.run(_or_refusal, train, scenario, _step_clipping_by_hand)):
        if not isinstance(said, str):
            raise AssertionError(
                f"{kit.target.name}: rank {rank} clips between backward and step, and trains on"
            )
        if "max_grad_norm" not in said:
            raise AssertionError(f"{kit.target.name}: the refusal names no remedy: {said}")


def _step_clipping_by_hand(
    engine: Engine, world: World, batch: Batch, loss_fn: Callable[[Any, Any], Any]
) -> StepResult:
    add_telling_the_last(engine, world, batch, loss_fn)
    nn.utils.clip_grad_norm_(engine.module.parameters(), 0.01)
    return engine.step()


UNUSED_IN_STEP = 3


def _sometimes_used() -> Samples:
    """Points, of which those of one step's batch leave a part of the model out."""
    data = models.points(NUM_SAMPLES)
    left_out = Scenario(num_steps=UNUSED_IN_STEP).order()[-1]
    used = torch.ones(NUM_SAMPLES, dtype=torch.bool)
    used[left_out] = False
    data.columns["used"] = used
    return data


def _classify_by_parts(model: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    logits = model(batch["x"], bool(batch["used"][0]))
    return of_logits(logits, batch)


@case
def knows_unused_parameters(kit: Kit) -> None:
    """A parameter that no rank uses in a step stays as it is, or is named before anything steps.

    Also where that step is the run's last, after which no forward pass could find it out.
    """
    scenario = Scenario(models.PartlyUsed, _sometimes_used, _classify_by_parts)
    for num_steps in (UNUSED_IN_STEP, UNUSED_IN_STEP + 2):
        asked = kit.fit(replace(scenario, num_steps=num_steps))
        ranks = kit.run(_or_refusal, train, asked)
        if refusals := [said for said in ranks if isinstance(said, str)]:
            assert_refusals(kit, ranks, refusals, "extra")
        else:
            kit.check(merge(ranks), asked, subject=f"{kit.target.name}, a parameter unused")


def _refuses_to_be_cut(strategy: Strategy, world: World, scenario: Scenario) -> None:
    engine = strategy.prepare(scenario.spec(world.data_size), world)
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
        *_gan_models(kit.experts), [data.batch(indices) for indices in GAN.order()], adamw
    )
    ways: dict[str, Any] = {"train_step": _step_whole}
    if kit.capabilities.custom_loop:
        ways |= {"backward": _step_cut, "forwards held": _step_held}
    for way, step in ways.items():
        subject = f"{kit.target.name}, GAN by {way}"
        runs_g, runs_d = zip(*kit.run(_train_gan, step), strict=True)
        for runs, expected, name in (
            (runs_d, expected_d, "discriminator"),
            (runs_g, expected_g, "generator"),
        ):
            trace = merge(list(runs)).trace
            assert_equal_runs(trace, expected, TOLERANCE, subject=f"{subject}, {name}")


def _gan_models(experts: bool) -> tuple[nn.Module, nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        both = models.Network(4, 2), models.Network(2, 1)
        for model in both if experts else ():
            models.with_experts(model)
        return both


def _train_gan(strategy: Strategy, world: World, step: Any) -> tuple[RankRun, RankRun]:
    generator, discriminator = _gan_models(world.layout.ep > 1)
    g = strategy.prepare(EngineSpec(generator, adamw, name="generator"), world)
    d = strategy.prepare(EngineSpec(discriminator, adamw, name="discriminator"), world)
    trace_g, trace_d = Trace(), Trace()
    for batch in batches(GAN, world):
        of_d, of_g = step(g, d, world, batch)
        record(trace_d, of_d)
        record(trace_g, of_g)
    result = RankRun(trace_g, Exported.of(g)), RankRun(trace_d, Exported.of(d))
    d.close()
    g.close()
    return result


def _judged(on_real: torch.Tensor, on_fake: torch.Tensor) -> torch.Tensor:
    return bce(on_real, torch.ones_like(on_real)) + bce(on_fake, torch.zeros_like(on_fake))


def _believed(on_fake: torch.Tensor) -> torch.Tensor:
    return bce(on_fake, torch.ones_like(on_fake))


def _step_whole(
    g: Engine, d: Engine, world: World, batch: Batch, take: TakeStep | None = None
) -> tuple[StepResult, StepResult]:
    def judge(model: Any, data: Mapping[str, torch.Tensor]) -> Loss:
        with torch.no_grad():
            fake = g.module(data["noise"])
        return _judged(model(data["real"]), model(fake))

    def deceive(model: Any, data: Mapping[str, torch.Tensor]) -> Loss:
        return _believed(d.module(model(data["noise"])))

    if take is None:
        return d.train_step(batch, judge), g.train_step(batch, deceive)
    return take(d, world, batch, judge), take(g, world, batch, deceive)


def _step_cut(g: Engine, d: Engine, world: World, batch: Batch) -> tuple[StepResult, StepResult]:
    return _step_whole(g, d, world, batch, step_by_hand)


def _step_held(g: Engine, d: Engine, world: World, batch: Batch) -> tuple[StepResult, StepResult]:
    """The generator's forward passes are held while the discriminator steps."""
    parts = [move_to(part.data, world.device) for part in batch]
    fakes = [g(part["noise"]) for part in parts]
    losses = [
        _judged(d(part["real"]), d(fake.detach())) for part, fake in zip(parts, fakes, strict=True)
    ]
    for loss, microbatch in zip(losses, batch, strict=True):
        backward(d, loss, microbatch)
    of_d = d.step()
    for fake, microbatch in zip(fakes, batch, strict=True):
        backward(g, _believed(d.module(fake)), microbatch)
    return of_d, g.step()


@case
def shares_parameters(kit: Kit) -> None:
    """Two engines with parameters in common take steps in turn, each with its own optimizer."""
    able = kit.capabilities
    if not able.several_engines or able.splits_tensors:
        # It is for the session to refuse, which knows of both.
        return
    data = SHARED.data()
    expected = reference.train_in_turn(
        _two_heads(), [data.batch(indices) for indices in SHARED.order()], classify, adamw
    )
    runs = zip(*kit.run(_train_two_heads), strict=True)
    for number, (ranks, trace) in enumerate(zip(runs, expected, strict=True), start=1):
        subject = f"{kit.target.name}, engine {number} of two that share parameters"
        assert_equal_runs(merge(list(ranks)).trace, trace, TOLERANCE, subject=subject)


def _two_heads() -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        trunk = nn.Linear(models.FEATURES, 9)
        return [_Headed(trunk), _Headed(trunk)]


class _Headed(nn.Module):
    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(9, models.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.trunk(x)))


def _train_two_heads(strategy: Strategy, world: World) -> list[RankRun]:
    engines = [
        strategy.prepare(EngineSpec(model, adamw, name=str(number)), world)
        for number, model in enumerate(_two_heads())
    ]
    traces = [Trace() for _ in engines]
    for batch in batches(SHARED, world):
        for engine, trace in zip(engines, traces, strict=True):
            record(trace, engine.train_step(batch, SHARED.loss))
    results = [
        RankRun(trace, Exported.of(engine)) for trace, engine in zip(traces, engines, strict=True)
    ]
    for engine in engines:
        engine.close()
    return results


@case_also_at(4, in_brief=False)
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

    loss = watched(scenario.loss, lambda: modes.append(engine.module.training))
    loader = scenario.loader(world.data_rank, world.data_size, shuffle=False)
    total, count = 0.0, 0.0
    for batch in loader:
        part = engine.eval_batch(batch, loss)
        total, count = total + float(part.total), count + float(part.count)
    evaluating = any(modes)
    shares = world.gather((total, count) if world.leads else (0.0, 0.0))
    mean = evaluate(engine, loader, scenario.loss, world)["loss"]
    engine.train_step(next(batches(scenario, world)), loss)
    engine.close()
    return sum(t for t, _ in shares), sum(c for _, c in shares), mean, (evaluating, modes[-1])
