"""A run with several optimizers moves from strategy to strategy, each with its schedule."""

from __future__ import annotations

from pathlib import Path

import pytest

from unipar import checkpoint
from unipar.strategy import Strategy, registry
from unipar.testing.cases.shapes import SEVERAL
from unipar.testing.harness import batches, learning_rates
from unipar.testing.kit import TOLERANCE, Kit, Target
from unipar.testing.pool import WorldPools
from unipar.testing.scenarios import reference_trace
from unipar.world import World

PLACES = ("ddp:shard_optimizer=true", "zero2", "fsdp")
"""The first keeps each optimizer's state apart, the second in one flat tensor for each group."""
STEPS = 3


def go_on(
    strategy: Strategy, world: World, directory: Path, start: int
) -> list[tuple[float, tuple[float, ...]]]:
    engine = strategy.prepare(SEVERAL.spec(world.data_size), world)
    engines = {"model": engine}
    if start:
        checkpoint.load(directory, engines, world)
    seen = []
    for batch in batches(SEVERAL, world, start=start):
        rates = learning_rates(engine)
        seen.append((engine.train_step(batch, SEVERAL.loss).loss, rates))
        if len(seen) == STEPS:
            break
    checkpoint.save(directory, engines, world, step=engine.num_steps, strategy=strategy.name)
    engine.close()
    return seen


def test_they_go_on_under_another_strategy(tmp_path: Path, world_pool: WorldPools) -> None:
    expected = reference_trace(SEVERAL)
    # Where another torch is tried, frameworks are not there.
    here = set(registry.names())
    places = [place for place in PLACES if place.partition(":")[0] in here]
    for number, place in enumerate(places):
        start = number * STEPS
        (seen, _) = Kit(Target.named(place), 2, world_pool).run(go_on, tmp_path, start)
        losses, rates = zip(*seen, strict=True)
        assert losses == pytest.approx(expected.losses[start:][:STEPS], rel=TOLERANCE), place
        assert list(rates) == expected.lrs[start:][:STEPS], place
