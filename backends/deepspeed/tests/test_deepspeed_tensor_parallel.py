"""AutoTP under each stage of ZeRO trains the run of a plain loop in one process."""

from __future__ import annotations

import functools
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_models import (
    BATCH,
    CLIP,
    KINDS,
    Sentences,
    Step,
    adamw,
    entropy,
    language_model,
    plain_loop,
    schedule,
)

from unipar import LossSum, Session
from unipar.testing.compare import assemble_weights, assert_equal_weights
from unipar.testing.harness import Exported
from unipar.testing.pool import WorldPools
from unipar.world import Placement

pytestmark = pytest.mark.slow

STEPS, HALF = 10, 5
TIED = {"tie_word_embeddings": True}


def loss_of(model: Any, batch: Any) -> LossSum:
    return LossSum(*entropy(model, batch))


def prepare(session: Session, model: Any, micro: int | None = None, **asked: Any) -> Any:
    settings = {"optimizer": adamw, "lr_scheduler": schedule, "max_grad_norm": CLIP, **asked}
    loader = session.loader(
        Sentences(), global_batch_size=BATCH, micro_batch_size=micro, shuffle=False
    )
    return session.prepare(model, **settings), loader


def take(engine: Any, loader: Any, steps: int) -> list[Step]:
    def endless() -> Any:
        while True:
            yield from loader

    found = (engine.train_step(batch, loss_of) for batch in islice(endless(), steps))
    return [Step(step.loss, step.grad_norm, step.num_items) for step in found]


def train(
    placement: Placement,
    strategy: str,
    micro: int | None,
    settings: dict[str, Any],
    activations: str = "off",
) -> tuple[list[Step], Exported]:
    with Session(strategy, device="cpu", placement=placement) as session:
        # Each rank's own weights, of which those of rank 0 must be what is trained.
        model = language_model(seed=placement.rank, **settings)
        engine, loader = prepare(session, model, micro, activation_checkpointing=activations)
        return take(engine, loader, STEPS), Exported.of(engine)


@functools.cache
def expected(settings: tuple[tuple[str, Any], ...]) -> tuple[list[Step], dict[str, torch.Tensor]]:
    model = language_model(**dict(settings))
    return plain_loop(model, STEPS), model.state_dict()


def assert_same(done: list[Step], wanted: list[Step]) -> None:
    assert done == [pytest.approx(step, rel=1e-5) for step in wanted]


@pytest.mark.parametrize(
    ("strategy", "ranks", "micro", "settings"),
    [
        ("zero1:tp=2", 2, None, {}),
        ("zero2:tp=2", 2, 3, TIED),
        ("zero3:tp=2", 2, 3, {}),
        ("zero1:tp=2", 4, 1, TIED),
        ("zero2:tp=2", 4, None, {"kind": "Qwen2"}),
        ("zero3:tp=2,persistence_threshold=0", 4, 1, TIED),
        ("zero2:tp=2", 2, 3, {"kind": "Mistral"}),
    ],
)
def test_losses_gradient_norms_and_weights_are_those_of_a_plain_loop(
    strategy: str,
    ranks: int,
    micro: int | None,
    settings: dict[str, Any],
    world_pool: WorldPools,
) -> None:
    steps, weights = expected(tuple(settings.items()))
    results = world_pool(ranks).run(train, strategy, micro, settings)
    for done, _ in results:
        assert_same(done, steps)
    assert_equal_weights(assemble_weights([state for _, state in results]), weights, 1e-5)
