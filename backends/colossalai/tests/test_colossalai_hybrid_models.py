"""Every model that ``hybrid`` takes trains, divided in each way, the run of a plain loop."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from colossalai_hybrid import BOTH, OWN_LOSS, PP, TP, prepare, take
from colossalai_models import KINDS, Step, language_model, plain_loop

from unipar import Objective, Session
from unipar.testing.compare import assemble_weights, assert_equal_weights
from unipar.testing.harness import Exported
from unipar.testing.pool import WorldPools
from unipar.world import Placement

pytestmark = pytest.mark.slow

STEPS, HALF = 10, 5
NEW = [kind for kind in KINDS if kind not in ("Llama", "Mistral")]
"""Those that no other test has compared."""


def train(
    placement: Placement,
    strategy: str,
    kind: str,
    micro: int | None = None,
    loss: Any = None,
    **settings: Any,
) -> tuple[list[Step], Exported]:
    with Session(strategy, device="cpu", placement=placement) as session:
        # Each rank's own weights, of which those of rank 0 must be what is trained.
        engine, loader = prepare(
            session, language_model(kind, seed=placement.rank, **settings), micro
        )
        return take(engine, loader, STEPS, loss), Exported.of(engine)


@functools.cache
def expected(kind: str, attention: str = "eager") -> tuple[list[Step], dict[str, torch.Tensor]]:
    model = language_model(kind, attn_implementation=attention)
    steps = plain_loop(model, STEPS)
    return steps, model.state_dict()


def assert_same(done: list[Step], wanted: list[Step]) -> None:
    assert done == [pytest.approx(step, rel=1e-5) for step in wanted]


# Divided in one way, each model is compared below: with its own loss where a checkpoint goes on,
# and with the user's.
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        (BOTH, 4),
        *(pytest.param(name, 2, marks=pytest.mark.thorough) for name in (TP, PP)),
    ],
)
@pytest.mark.parametrize("kind", NEW)
def test_losses_gradient_norms_and_weights_are_those_of_a_plain_loop(
    kind: str, strategy: str, ranks: int, world_pool: WorldPools
) -> None:
    steps, weights = expected(kind)
    results = world_pool(ranks).run(train, strategy, kind, 3)
    for done, _ in results:
        assert_same(done, steps)
    assert_equal_weights(assemble_weights([state for _, state in results]), weights, 1e-5)


ATTENTIONS = {"GPT2": "sdpa", "Qwen2": "sdpa", "GPTJ": "eager", "Bloom": "eager"}
"""PyTorch's, of the models that have it."""


@pytest.mark.parametrize("strategy", [TP, PP])
@pytest.mark.parametrize("kind", NEW)
def test_a_loss_of_the_users_own_is_honored_with_any_attention(
    kind: str, strategy: str, world_pool: WorldPools
) -> None:
    attention = ATTENTIONS[kind]

    def run(placement: Placement) -> list[Step]:
        return train(placement, strategy, kind, loss=OWN_LOSS, attn_implementation=attention)[0]

    for done in world_pool(2).run(run):
        assert_same(done, expected(kind, attention)[0])


NO_MASK = Objective(
    lambda batch: {"input_ids": batch["input_ids"], "labels": batch["input_ids"]},
    lambda output, batch: output.loss,
)


@pytest.mark.parametrize(
    ("kind", "attention"),
    [*((kind, "eager") for kind in NEW), ("GPT2", "sdpa"), ("Qwen2", "sdpa")],
)
def test_a_mask_may_be_left_out(kind: str, attention: str, world_pool: WorldPools) -> None:
    def run(placement: Placement, strategy: str) -> list[float]:
        with Session(strategy, device="cpu", placement=placement) as session:
            engine, loader = prepare(session, language_model(kind, attn_implementation=attention))
            return [step.loss for step in take(engine, loader, 3, NO_MASK)]

    (wanted,) = world_pool(1).run(run, "single")
    for losses in world_pool(2).run(run, PP):
        assert losses == pytest.approx(wanted, rel=1e-5)


def save_or_resume(
    placement: Placement, strategy: str, kind: str, path: Path, resume: bool
) -> list[Step]:
    with Session(strategy, device="cpu", placement=placement) as session:
        engine, loader = prepare(session, language_model(kind, seed=int(resume)))
        if resume:
            assert session.load(path, loader=loader) == HALF
        done = take(engine, loader, HALF)
        if not resume:
            session.save(path, loader=loader)
        return done


@pytest.mark.parametrize(
    "kind",
    [
        # These are divided as GPT-2 and Llama are.
        pytest.param(kind, marks=pytest.mark.thorough if kind in ("GPTJ", "Qwen2") else [])
        for kind in NEW
    ],
)
def test_a_checkpoint_goes_on_whole_and_divided(
    kind: str, world_pool: WorldPools, tmp_path: Path
) -> None:
    steps, _ = expected(kind)
    single, both = ("single", 1), (BOTH, 4)
    for (source, of), targets in ((single, [both, (TP, 2)]), (both, [single, (PP, 2)])):
        path = tmp_path / source
        world_pool(of).run(save_or_resume, source, kind, path, False)
        for target, ranks in targets:
            for done in world_pool(ranks).run(save_or_resume, target, kind, path, True):
                assert_same(done, steps[HALF:])
