"""PyTorch's own strategies go on from what any other has saved, on any number of ranks."""

from __future__ import annotations

import pytest

from unipar.testing.pool import WorldPools
from unipar.testing.portability import (
    HALF,
    RELATIVE,
    Saved,
    Where,
    assert_goes_on,
    difference,
    resume_each,
    ring,
    uninterrupted,
)

pytestmark = pytest.mark.slow

SHARDING = ("ddp", "ddp:shard_optimizer=true", "fsdp", "fsdp:sharding=hybrid")
PLACES = [Where("single", 1), *(Where(name, ranks) for ranks in (1, 2, 4) for name in SHARDING)]


@pytest.fixture(scope="module")
def saved(world_pool: WorldPools, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(world_pool, tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize(("source", "target"), ring(PLACES), ids=str)
def test_resumes_what_its_neighbor_has_saved(
    source: Where, target: Where, saved: Saved, world_pool: WorldPools
) -> None:
    assert_goes_on(target, saved.of([source]), world_pool)


@pytest.mark.thorough
@pytest.mark.parametrize("target", PLACES, ids=str)
def test_resumes_what_any_other_has_saved(
    target: Where, saved: Saved, world_pool: WorldPools
) -> None:
    assert_goes_on(target, saved.of(PLACES), world_pool)


def test_notices_a_resume_that_forgets_the_optimizer(saved: Saved, world_pool: WorldPools) -> None:
    path = saved[Where("fsdp", 2)]
    ((_, losses),) = world_pool(2).run(resume_each, "ddp", [path], False)[0]
    expected = uninterrupted()[HALF:]
    assert difference(losses[:1], expected[:1]) < RELATIVE
    assert difference(losses, expected) > RELATIVE
