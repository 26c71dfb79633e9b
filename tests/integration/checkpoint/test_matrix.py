"""PyTorch's own strategies go on from what any other has saved, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from unipar.checkpoint import load_model, to_safetensors
from unipar.testing.checkpoints import Saved, checkpoint_tests
from unipar.testing.pool import WorldPools
from unipar.testing.portability import (
    HALF,
    RELATIVE,
    Language,
    Where,
    difference,
    resume_each,
    uninterrupted,
)

pytestmark = pytest.mark.slow

SHARDING = ("ddp", "ddp:shard_optimizer=true", "fsdp", "fsdp:sharding=hybrid")
STAGES = Where("mesh:pp=2,stages=[[embedding,position,blocks.0],[blocks.1,head,calls]]", 2)
PLACES = [
    Where("single", 1),
    *(Where(name, ranks) for ranks in (1, 2, 4) for name in SHARDING),
    # Layers are divided too: by two ranks, and by two pairs of them.
    *(Where("mesh:tp=2", ranks) for ranks in (2, 4)),
    # Layers are on different ranks; the buffer changes where the last of them are.
    STAGES,
]

(
    test_resumes_what_its_neighbor_has_saved,
    test_resumes_what_any_other_has_saved,
) = checkpoint_tests(PLACES)


@pytest.mark.parametrize("place", [Where("mesh:tp=2", 2), STAGES], ids=str)
def test_safetensors_of_divided_models_are_the_whole_models(
    place: Where, saved_checkpoints: Saved, tmp_path: Path
) -> None:
    saved = saved_checkpoints[place]
    alone = load_model(saved_checkpoints[Where("single", 1)], Language).state_dict()
    written = to_safetensors(saved, tmp_path / "out")
    found = load_file(written / "model.safetensors")
    # A tied weight is written once.
    assert alone.keys() - found.keys() == {"head.weight"}
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, alone[name], rtol=1e-4, atol=1e-6)


def test_notices_a_resume_that_forgets_the_optimizer(
    saved_checkpoints: Saved, world_pool: WorldPools
) -> None:
    path = saved_checkpoints[Where("fsdp", 2)]
    ((_, losses),) = world_pool(2).run(resume_each, "ddp", [path], False)[0]
    expected = uninterrupted()[HALF:]
    assert difference(losses[:1], expected[:1]) < RELATIVE
    assert difference(losses, expected) > RELATIVE
