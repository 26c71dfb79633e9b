"""Saving a run, and going on with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from unipar import checkpoint
from unipar.strategy import Strategy
from unipar.testing.cases.case import case_also_at
from unipar.testing.cases.numbers import SHORT_TOKENS
from unipar.testing.cases.shapes import SEVERAL
from unipar.testing.harness import Exported, RankRun, batches, learning_rates, record, trained_on
from unipar.testing.kit import Kit, merge_all
from unipar.testing.reference import Trace
from unipar.testing.scenarios import Scenario
from unipar.utils.scratch import scratch
from unipar.world import World

SAVED_AT = 4


@case_also_at(4)
def resumes(kit: Kit) -> None:
    """Saved after four steps and loaded into a fresh engine, a run goes on as if undisturbed."""
    scenarios = [SEVERAL, replace(SHORT_TOKENS, max_grad_norm=0.5)]
    scenarios = [kit.fit(scenario) for scenario in scenarios if not kit.refuses(scenario)]
    with scratch() as directory:
        runs = merge_all(kit.run(_interrupt, scenarios, directory))
    for run, scenario in zip(runs, scenarios, strict=True):
        kit.check(run, scenario, subject=f"{kit.target.name}, resumed")


def _interrupt(
    strategy: Strategy, world: World, scenarios: list[Scenario], directory: Path
) -> list[RankRun]:
    return [
        _interrupted_run(strategy, world, scenario, directory / str(number))
        for number, scenario in enumerate(scenarios)
    ]


def _interrupted_run(
    strategy: Strategy, world: World, scenario: Scenario, directory: Path
) -> RankRun:
    trace, samples = Trace(), []
    engine = strategy.prepare(scenario.spec(world.data_size), world)
    for step, batch in enumerate(batches(scenario, world)):
        if step == SAVED_AT:
            path = checkpoint.save(
                directory, {"model": engine}, world, step=step, strategy=strategy.name
            )
            engine.close()
            # Other weights, so that what is not loaded is seen.
            other = replace(scenario, seed=scenario.seed + 1)
            engine = strategy.prepare(other.spec(world.data_size), world)
            manifest = checkpoint.load(path, {"model": engine}, world)
            if manifest.step != step or engine.num_steps != step:
                raise AssertionError(
                    f"saved at step {step}; the manifest says {manifest.step}, and the engine "
                    f"counts {engine.num_steps}"
                )
        trace.lrs.append(learning_rates(engine))
        samples.append(trained_on(batch))
        record(trace, engine.train_step(batch, scenario.loss))
    exported = Exported.of(engine)
    engine.close()
    return RankRun(trace, exported, samples, data_rank=world.data_rank)
