"""A run saved under Accelerate goes on under PyTorch's own strategies, and the other way around."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from unipar import Session
from unipar.errors import CheckpointError
from unipar.testing.checkpoints import Saved, checkpoint_tests
from unipar.testing.pool import WorldPools
from unipar.testing.portability import Where, make_optimizer
from unipar.world import Placement

PLACES = [
    *(Where("single", 1), Where("ddp", 2), Where("fsdp", 4)),
    *(Where("accelerate", 1), Where("accelerate", 2), Where("accelerate", 4)),
]

pytestmark = pytest.mark.slow

(
    test_resumes_what_its_neighbor_has_saved,
    test_resumes_what_any_other_has_saved,
) = checkpoint_tests(PLACES)


def load_into_another_model(placement: Placement, path: Path) -> None:
    with Session("accelerate", device="cpu", placement=placement) as session:
        session.prepare(nn.Linear(2, 2), optimizer=make_optimizer)
        session.load(path)


def test_a_checkpoint_of_another_model_is_refused(
    saved_checkpoints: Saved, world_pool: WorldPools
) -> None:
    with pytest.raises(CheckpointError, match=r"embedding\.weight"):
        world_pool(2).run(load_into_another_model, saved_checkpoints[Where("accelerate", 2)])
