"""A run saved under Accelerate goes on under PyTorch's own strategies, and the other way around."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from unipar import Session
from unipar.errors import CheckpointError
from unipar.testing.pool import WorldPools
from unipar.testing.portability import Saved, Where, assert_goes_on, make_optimizer, ring
from unipar.world import Placement

PLACES = [
    *(Where("single", 1), Where("ddp", 2), Where("fsdp", 4)),
    *(Where("accelerate", 1), Where("accelerate", 2), Where("accelerate", 4)),
]

pytestmark = pytest.mark.slow


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


def load_into_another_model(placement: Placement, path: Path) -> None:
    with Session("accelerate", device="cpu", placement=placement) as session:
        session.prepare(nn.Linear(2, 2), optimizer=make_optimizer)
        session.load(path)


def test_a_checkpoint_of_another_model_is_refused(saved: Saved, world_pool: WorldPools) -> None:
    with pytest.raises(CheckpointError, match=r"embedding\.weight"):
        world_pool(2).run(load_into_another_model, saved[Where("accelerate", 2)])
