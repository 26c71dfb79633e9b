"""A run saved under a plugin goes on under PyTorch's own strategies, and the other way around."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar import Session
from unipar.errors import CheckpointError
from unipar.testing.checkpoints import Saved, checkpoint_tests
from unipar.testing.compare import assemble, assemble_weights, assert_equal_weights
from unipar.testing.harness import Exported
from unipar.testing.pool import WorldPools
from unipar.testing.portability import Where, make_optimizer
from unipar.world import Placement

DDP, ZERO1, ZERO2, GEMINI, FSDP = (
    f"colossalai:plugin={plugin}" for plugin in ("ddp", "zero1", "zero2", "gemini", "fsdp")
)

SOURCES = [
    *(Where("single", 1), Where("ddp", 2), Where("fsdp", 4)),
    *(Where(DDP, 2), Where(ZERO1, 2), Where(ZERO2, 2), Where(ZERO2, 4)),
    *(Where(FSDP, 2), Where(FSDP, 4)),
]
TARGETS = [
    *(Where("single", 1), Where("ddp", 2), Where("fsdp", 2)),
    *(Where(DDP, 1), Where(ZERO1, 4), Where(ZERO2, 1), Where(ZERO2, 2)),
    *(Where(FSDP, 1), Where(FSDP, 2), Where(FSDP, 4)),
]

# Gemini has no fp32, so that what is in half precision moves to and from it.
HALF_SOURCES = [Where("single", 1), Where("ddp", 2), Where(GEMINI, 2), Where(GEMINI, 4)]
HALF_TARGETS = [
    *(Where("single", 1), Where("ddp", 2), Where("fsdp", 2), Where(ZERO2, 2)),
    *(Where(GEMINI, 1), Where(GEMINI, 2), Where(GEMINI, 4)),
]

pytestmark = pytest.mark.slow

(
    test_resumes_what_one_source_has_saved,
    test_resumes_what_any_source_has_saved,
) = checkpoint_tests(TARGETS, SOURCES)
(
    test_resumes_in_bf16_what_one_source_has_saved,
    test_resumes_in_bf16_what_any_source_has_saved,
) = checkpoint_tests(HALF_TARGETS, HALF_SOURCES, "bf16")


def test_a_checkpoint_of_another_model_is_refused(
    saved_checkpoints: Saved, world_pool: WorldPools
) -> None:
    path = saved_checkpoints[Where(ZERO2, 2)]
    with pytest.raises(CheckpointError, match=r"embedding\.weight"):
        world_pool(2).run(load_into_another_model, path)


def load_into_another_model(placement: Placement, path: Path) -> None:
    with Session(ZERO2, device="cpu", placement=placement) as session:
        session.prepare(nn.Linear(2, 2), optimizer=make_optimizer)
        session.load(path)


class Scaled(nn.Module):
    """A scalar weight, and one of fewer elements than there are ranks."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(start))
        self.shift = nn.Parameter(torch.full((3,), start))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + self.shift


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD], ids=["adam", "sgd"])
def test_weights_too_small_to_divide_are_saved_and_loaded(
    kind: type, world_pool: WorldPools, tmp_path: Path
) -> None:
    before = world_pool(4).run(train_scaled, ZERO2, kind, 1.0, tmp_path, False)
    after = world_pool(1).run(train_scaled, ZERO2, kind, 2.0, tmp_path, True)
    for part in (lambda parts: parts.optimizer, lambda parts: parts.weights):
        assert_equal_weights(
            assemble([part(one) for one in after]), assemble([part(one) for one in before]), 0.0
        )
    assert assemble_weights(after)["factor"] != 2.0


def train_scaled(
    placement: Placement, strategy: str, kind: type, start: float, path: Path, resume: bool
) -> Exported:
    options: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    with Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(
            Scaled(start), optimizer=lambda named: kind([p for _, p in named], lr=0.1, **options)
        )
        loader = session.loader(torch.ones(8, 3), global_batch_size=4)
        if resume:
            session.load(path, loader=loader)
        else:
            for batch in loader:
                engine.train_step(batch, lambda model, x: model(x).square().mean())
            session.save(path, loader=loader)
        return Exported.of(engine)
