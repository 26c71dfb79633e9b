"""DeepSpeed goes on from what others have saved, and others from what it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from unipar.testing.pool import WorldPools
from unipar.testing.portability import Where, assert_goes_on, save_all

pytestmark = pytest.mark.slow

OTHERS = [Where("single", 1), Where("ddp", 4), Where("fsdp", 2)]
OWN = [
    Where("deepspeed:stage=0", 2),
    Where("zero1", 4),
    Where("zero2:round_robin_gradients=true", 2),
    Where("zero2:offload_optimizer=true", 1),
    Where("zero3:persistence_threshold=0", 4),
    Where("zero3:persistence_threshold=50,sub_group_size=300", 2),
]


@pytest.fixture(scope="module")
def saved(world_pool: WorldPools, tmp_path_factory: pytest.TempPathFactory) -> dict[Where, Path]:
    return save_all([*OTHERS, *OWN], world_pool, tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("target", [*OTHERS, *OWN], ids=str)
def test_resumes_what_any_other_has_saved(
    target: Where, saved: dict[Where, Path], world_pool: WorldPools
) -> None:
    assert_goes_on(target, saved, world_pool)
