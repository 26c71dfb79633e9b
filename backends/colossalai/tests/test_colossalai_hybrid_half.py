"""Half precision, divided in each way, is as far from fp32 as a plain loop's, and no further."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch
from colossalai_hybrid import BOTH, OWN_LOSS, PP, TP, each_step
from colossalai_models import (
    BATCH,
    CLIP,
    KINDS,
    Sentences,
    adamw,
    entropy,
    language_model,
    schedule,
)
from torch import nn

from unipar import Session
from unipar.testing.cases.numbers import MOST_SKIPPED
from unipar.testing.compare import difference, relative
from unipar.testing.harness import Exported
from unipar.testing.kit import HALF_PRECISION_FACTOR, ROUNDINGS, TOLERANCE, Kit, Run, Target
from unipar.testing.models import Samples
from unipar.testing.pool import WorldPools
from unipar.testing.scenarios import Scenario, reference_trace
from unipar.world import Placement

pytestmark = pytest.mark.slow
thorough = pytest.mark.thorough

STEPS, HALF, SEEDS = 12, 7, 4
"""One run of so small a model says little of what rounding does: several are taken together."""


def sentences() -> Samples:
    # Where all that a token sees is masked, GPT-2's eager attention in half precision looks ahead.
    return Samples(**Sentences(mask_last=True)[:])


def small_steps(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """As in fp32, at rates at which a difference does not grow from step to step."""
    optimizer = adamw(named)
    for group in optimizer.param_groups:
        group["lr"] *= 0.1
    return optimizer


@functools.cache
def scenarios(kind: str, precision: Any) -> list[Scenario]:
    plain = Scenario(
        data=sentences,
        terms=entropy,
        weighted=True,
        objective=OWN_LOSS,
        optimizer=small_steps,
        scheduler=schedule,
        num_steps=STEPS,
        global_batch_size=BATCH,
        accumulation=2,
        precision=precision,
        max_grad_norm=CLIP,
    )
    return [
        replace(plain, model=functools.partial(language_model, kind, seed=seed), seed=seed)
        for seed in range(SEEDS)
    ]


def assert_rounded(kit: Kit, runs: Sequence[Run], asked: Sequence[Scenario]) -> None:
    """The kit's bound, on the mean over the runs of how far each of them is from fp32."""
    found, rounding = [], []
    for run, scenario in zip(runs, asked, strict=True):
        skipped = frozenset(step for step, was in enumerate(run.trace.skipped) if was)
        assert len(skipped) <= MOST_SKIPPED[scenario.precision]
        for step in skipped:
            run.trace.grad_norms[step] = None
        rounded = replace(scenario, leave_out=skipped)
        exact = reference_trace(replace(rounded, precision="fp32"))
        assert run.trace.num_items == exact.num_items
        assert {n: t.dtype for n, t in run.trace.weights.items()} == {
            n: t.dtype for n, t in exact.weights.items()
        }
        found.append(difference(run.trace, exact))
        rounding.append(kit.rounding(rounded))
        assert found[-1].largest > TOLERANCE, "the precision changed nothing"
    for what in ("loss", "grad_norm", "weights"):
        own, bound = (fmean(getattr(one, what) for one in of) for of in (found, rounding))
        print(f"{kit.target.name}: {what} {own:.1e}, reference {bound:.1e}")
        assert own <= HALF_PRECISION_FACTOR * bound, what


def _shortly(kind: str, strategy: str, precision: str) -> bool:
    """Whether no other of these tests would catch as well what this one does.

    One model does for fp16, whose scaler no model knows of: Llama, whose losses in bf16 are
    compared with what rounding does where its checkpoints go on. What others have of their own is
    compared in fp32 where models are.
    """
    return (kind, strategy, precision) == ("Llama", BOTH, "fp16")


EVERY = [
    pytest.param(
        kind,
        strategy,
        ranks,
        precision,
        marks=[] if _shortly(kind, strategy, precision) else thorough,
    )
    for kind in KINDS
    for strategy, ranks in [(TP, 2), (PP, 2), (BOTH, 4)]
    for precision in ("bf16", "fp16")
] + [
    pytest.param("Llama", f"{TP},zero_stage={stage}", 4, precision, marks=thorough)
    for stage, precision in ((1, "fp16"), (2, "bf16"))
]


@pytest.mark.parametrize(("kind", "strategy", "ranks", "precision"), EVERY)
def test_a_run_is_no_further_from_fp32_than_rounding_takes_it(
    kind: str, strategy: str, ranks: int, precision: str, world_pool: WorldPools
) -> None:
    kit = Kit(Target.named(strategy), ranks, world_pool)
    asked = scenarios(kind, precision)
    assert_rounded(kit, kit.train(*asked), asked)


# -- what a run is made of besides its steps -----------------------------------------------------


class Seen(NamedTuple):
    loss: float
    grad_norm: float | None
    skipped: bool


def prepare(session: Session, seed: int = 0, activations: Any = "off") -> tuple[Any, Any]:
    engine = session.prepare(
        language_model(seed=seed),
        optimizer=small_steps,
        lr_scheduler=schedule,
        max_grad_norm=CLIP,
        activation_checkpointing=activations,
    )
    loader = session.loader(sentences(), global_batch_size=BATCH, micro_batch_size=3, shuffle=True)
    return engine, loader


def take(engine: Any, loader: Iterable[Any], steps: int) -> list[Seen]:
    done = each_step(engine, loader, steps, OWN_LOSS)
    return [Seen(step.loss, step.grad_norm, step.skipped) for step in done]


def train(placement: Placement, strategy: str, precision: Any, activations: Any) -> list[Seen]:
    with Session(strategy, device="cpu", precision=precision, placement=placement) as session:
        return take(*prepare(session, 0, activations), STEPS)


def save(placement: Placement, strategy: str, precision: Any, path: Path) -> list[Seen]:
    with Session(strategy, device="cpu", precision=precision, placement=placement) as session:
        engine, loader = prepare(session)
        done = take(engine, loader, HALF)
        session.save(path, loader=loader)
        return done


def resume(
    placement: Placement, strategy: str, precision: Any, paths: list[Path]
) -> list[list[Seen]]:
    with Session(strategy, device="cpu", precision=precision, placement=placement) as session:
        engine, loader = prepare(session, seed=1)
        runs = []
        for path in paths:
            assert session.load(path, loader=loader) == HALF
            runs.append(take(engine, loader, STEPS - HALF))
        return runs


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=thorough)])
def test_a_checkpoint_goes_on_whole_and_divided(
    precision: str, world_pool: WorldPools, tmp_path: Path
) -> None:
    sources = {("single", 1): [], (TP, 2): [], (BOTH, 4): []}
    paths = [tmp_path / str(number) for number, _ in enumerate(sources)]
    for source, path in zip(sources, paths, strict=True):
        strategy, ranks = source
        sources[source] = world_pool(ranks).run(save, strategy, precision, path)[0]
    for target, ranks in [("single", 1), (PP, 2), (BOTH, 4)]:
        for runs in world_pool(ranks).run(resume, target, precision, paths):
            for (source, before), after in zip(sources.items(), runs, strict=True):
                assert_goes_on([*before, *after], precision, f"{source} -> {target}")


def assert_goes_on(run: list[Seen], precision: str, which: str) -> None:
    """The kit's bound, on the losses of a run that was taken up somewhere else."""
    skipped = frozenset(index for index, step in enumerate(run) if step.skipped)
    assert len(skipped) <= MOST_SKIPPED[precision], which
    scenario = replace(scenarios("Llama", precision)[0], leave_out=skipped)
    exact = reference_trace(replace(scenario, precision="fp32")).losses

    def apart(losses: Sequence[float]) -> float:
        return max(map(relative, losses, exact))

    rounding = max(apart(reference_trace(scenario, parts=parts).losses) for parts in ROUNDINGS)
    found = apart([step.loss for step in run])
    assert found <= HALF_PRECISION_FACTOR * rounding, f"{which}: {found:.1e}, not {rounding:.1e}"


@pytest.mark.parametrize("strategy", [TP, PP])
def test_a_run_goes_on_in_its_own_place_to_the_bit(
    strategy: str, world_pool: WorldPools, tmp_path: Path
) -> None:
    pool = world_pool(2)
    pool.run(save, strategy, "fp16", tmp_path)
    whole = pool.run(train, strategy, "fp16", "off")
    assert [run[HALF:] for run in whole] == [
        run for (run,) in pool.run(resume, strategy, "fp16", [tmp_path])
    ]


@pytest.mark.parametrize("strategy", [TP, PP])
def test_recomputed_activations_change_nothing(strategy: str, world_pool: WorldPools) -> None:
    pool = world_pool(2)
    kept, recomputed = (pool.run(train, strategy, "bf16", which) for which in ("off", "full"))
    assert kept == recomputed


def evaluate_and_train(placement: Placement, strategy: str) -> tuple[float, float]:
    with Session(strategy, device="cpu", precision="bf16", placement=placement) as session:
        engine, loader = prepare(session)
        batch = next(iter(loader))
        evaluated = session.evaluate(engine, [batch], OWN_LOSS)["loss"]
        return evaluated, engine.train_step(batch, OWN_LOSS).loss


@pytest.mark.parametrize("strategy", [TP, PP])
def test_an_evaluation_rounds_as_training_does(strategy: str, world_pool: WorldPools) -> None:
    for evaluated, trained in world_pool(2).run(evaluate_and_train, strategy):
        assert evaluated == pytest.approx(trained, rel=1e-6)


def overflow(placement: Placement, strategy: str) -> tuple[list[bool], Exported, Exported]:
    with Session(strategy, device="cpu", precision="fp16", placement=placement) as session:
        engine, loader = prepare(session)
        batches = iter(loader)
        before = Exported.of(engine)
        # A hook stands for an overflow here, and is not to be refused.
        engine.hooks = None
        weight = next(engine.module.parameters())
        hook = weight.register_hook(lambda grad: grad * (math.inf if placement.rank == 1 else 1))
        first = engine.train_step(next(batches), OWN_LOSS)
        hook.remove()
        after = Exported.of(engine)
        return [first.skipped, engine.train_step(next(batches), OWN_LOSS).skipped], before, after


@pytest.mark.parametrize("strategy", [TP, PP])
def test_a_part_that_overflows_alone_is_skipped_everywhere(
    strategy: str, world_pool: WorldPools
) -> None:
    for skipped, before, after in world_pool(2).run(overflow, strategy):
        assert skipped == [True, False]
        for one, other in zip(before.weights, after.weights, strict=True):
            assert all(map(torch.equal, one.tensors, other.tensors)), one.name
