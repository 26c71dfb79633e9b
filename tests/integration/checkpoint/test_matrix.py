"""PyTorch's own strategies go on from what any other has saved, on any number of ranks."""

from __future__ import annotations

import pytest

from unipar.testing.checkpoints import Saved, checkpoint_tests
from unipar.testing.pool import WorldPools
from unipar.testing.portability import (
    HALF,
    RELATIVE,
    Where,
    difference,
    resume_each,
    uninterrupted,
)

pytestmark = pytest.mark.slow

SHARDING = ("ddp", "ddp:shard_optimizer=true", "fsdp", "fsdp:sharding=hybrid")
PLACES = [
    Where("single", 1),
    *(Where(name, ranks) for ranks in (1, 2, 4) for name in SHARDING),
    # Layers are divided too: by two ranks, and by two pairs of them.
    *(Where("mesh:tp=2", ranks) for ranks in (2, 4)),
]

(
    test_resumes_what_its_neighbor_has_saved,
    test_resumes_what_any_other_has_saved,
) = checkpoint_tests(PLACES)


def test_notices_a_resume_that_forgets_the_optimizer(
    saved_checkpoints: Saved, world_pool: WorldPools
) -> None:
    path = saved_checkpoints[Where("fsdp", 2)]
    ((_, losses),) = world_pool(2).run(resume_each, "ddp", [path], False)[0]
    expected = uninterrupted()[HALF:]
    assert difference(losses[:1], expected[:1]) < RELATIVE
    assert difference(losses, expected) > RELATIVE
