"""DeepSpeed goes on from what others have saved, and others from what it has."""

from __future__ import annotations

import pytest

from unipar.testing.pool import WorldPools
from unipar.testing.portability import Saved, Where, assert_goes_on, ring

pytestmark = pytest.mark.slow

PLACES = [
    *(Where("single", 1), Where("ddp", 4), Where("fsdp", 2)),
    Where("deepspeed:stage=0", 2),
    Where("zero1", 4),
    Where("zero2:round_robin_gradients=true", 2),
    Where("zero2:offload_optimizer=true", 1),
    Where("zero3:persistence_threshold=0", 4),
    Where("zero3:persistence_threshold=50,sub_group_size=300", 2),
]


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
