"""Tensor parallelism whose replicas divide the optimizer trains the same run as a plain loop."""

from __future__ import annotations

import functools
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from colossalai_hybrid import OWN_LOSS, prepare, take
from colossalai_models import BATCH, Sentences, Step, entropy, language_model, plain_loop

from unipar import LossSum, Session
from unipar.errors import ConfigError
from unipar.strategy import EngineSpec, registry
from unipar.testing.compare import assemble_weights, assert_equal_weights
from unipar.testing.harness import Exported
from unipar.testing.pool import WorldPools
from unipar.testing.portability import Where
from unipar.world import Placement

pytestmark = pytest.mark.slow

STEPS, HALF = 10, 5
ZERO1, ZERO2 = (f"colossalai:plugin=hybrid,tp_size=2,zero_stage={stage}" for stage in (1, 2))
TIED: dict[str, Any] = {"tie_word_embeddings": True}


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
    ("strategy", "micro", "settings", "activations"),
    [
        (ZERO1, None, {}, "off"),
        (ZERO2, 1, TIED, "off"),
        (ZERO1, 1, {"kind": "GPT2"}, "full"),
        *(
            pytest.param(strategy, 1, {"kind": kind}, "off", marks=pytest.mark.thorough)
            for kind in ("Mistral", "Qwen2", "GPT2", "GPTJ", "Bloom")
            for strategy in (ZERO1, ZERO2)
        ),
    ],
)
def test_losses_gradient_norms_and_weights_are_those_of_a_plain_loop(
    strategy: str,
    micro: int | None,
    settings: dict[str, Any],
    activations: str,
    world_pool: WorldPools,
) -> None:
    steps, weights = expected(tuple(settings.items()))
    results = world_pool(4).run(train, strategy, micro, settings, activations)
    for done, _ in results:
        assert_same(done, steps)
    parts = assemble_weights([state for _, state in results])
    assert_equal_weights(parts, weights, 1e-5)


def own_loop(placement: Placement) -> tuple[list[float], dict[str, float]]:
    with Session(ZERO2, device="cpu", placement=placement) as session:
        engine, loader = prepare(session, language_model(), 3)
        losses: list[float] = []
        for batch in islice(loader, HALF):
            for microbatch in batch:
                loss = OWN_LOSS(engine, microbatch.data)
                engine.backward(loss if microbatch.num_samples else LossSum(loss.total * 0, 0))
            losses.append(engine.step().loss)
        every = session.loader(Sentences(), global_batch_size=BATCH, shuffle=False)
        return losses, session.evaluate(engine, every, OWN_LOSS)


def test_a_loop_of_ones_own_and_an_evaluation(world_pool: WorldPools) -> None:
    model = language_model()
    wanted = [step.loss for step in plain_loop(model, HALF)]
    with torch.no_grad():
        total, count = entropy(model, Sentences()[:])
    for losses, metrics in world_pool(4).run(own_loop):
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert metrics["loss"] == pytest.approx((total / count).item(), rel=1e-5)


# -- checkpoints -----------------------------------------------------------------------------------

SOURCES = [Where("single", 1), Where("colossalai:plugin=hybrid,tp_size=2", 2), Where(ZERO1, 4)]
TARGETS = [Where(ZERO2, 4), Where(ZERO1, 4), Where("single", 1)]


def train_and_save(placement: Placement, strategy: str, directory: Path) -> None:
    with Session(strategy, device="cpu", placement=placement) as session:
        engine, loader = prepare(session, language_model(**TIED))
        take(engine, loader, HALF)
        session.save(directory, loader=loader)


def resume_each(placement: Placement, strategy: str, paths: list[Path]) -> list[list[Step]]:
    with Session(strategy, device="cpu", placement=placement) as session:
        engine, loader = prepare(session, language_model(seed=1, **TIED))
        runs = []
        for path in paths:
            assert session.load(path, loader=loader) == HALF
            runs.append(take(engine, loader, STEPS - HALF))
        return runs


@pytest.fixture(scope="module")
def saved(world_pool: WorldPools, tmp_path_factory: pytest.TempPathFactory) -> dict[Where, Path]:
    root = tmp_path_factory.mktemp("saved")
    paths = {where: root / str(number) for number, where in enumerate(SOURCES)}
    for where, path in paths.items():
        world_pool(where.ranks).run(train_and_save, where.strategy, path)
    return paths


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_resumes_what_any_source_has_saved(
    target: Where, saved: dict[Where, Path], world_pool: WorldPools
) -> None:
    wanted = expected(tuple(TIED.items()))[0][HALF:]
    for runs in world_pool(target.ranks).run(resume_each, target.strategy, list(saved.values())):
        for source, done in zip(saved, runs, strict=True):
            assert done == [pytest.approx(step, rel=1e-5) for step in wanted], source


# -- refusals --------------------------------------------------------------------------------------


def changed(what: str) -> Any:
    """A model with something in a layer that Colossal-AI would lose."""
    model = language_model()
    layer = model.model.layers[0].mlp.up_proj
    if what == "hook":
        layer.register_forward_hook(lambda *_: None)
    elif what == "gradient":
        layer.weight.register_hook(lambda gradient: gradient)
    return model


def refused(placement: Placement, strategy: str) -> list[str]:
    def penalized(model: Any, batch: Any) -> LossSum:
        squares = sum(weight.square().sum() for weight in model.parameters())
        return LossSum(entropy(model, batch)[0] + squares, 1)

    def attempt(what: str) -> None:
        with Session(strategy, device="cpu", placement=placement) as session:
            engine, loader = prepare(session, changed(what))
            engine.train_step(next(iter(loader)), penalized)

    said: list[str] = []
    for what in ("hook", "gradient", "penalty"):
        with pytest.raises(ConfigError) as refusal:
            attempt(what)
        said.append(str(refusal.value))
    return said


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("colossalai:plugin=hybrid,tp_size=2", 2), (ZERO2, 4)]
)
def test_what_would_be_of_parts_of_layers_or_lost_with_them_is_refused(
    strategy: str, ranks: int, world_pool: WorldPools
) -> None:
    for hook, gradient, penalty in world_pool(ranks).run(refused, strategy):
        assert "up_proj' (Linear) has a hook, which plugin='hybrid' loses" in hook
        assert "up_proj.weight' has a hook on its gradient" in gradient
        assert "each rank holds a part of the model: a penalty of the weights" in penalty


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            "colossalai:plugin=hybrid,tp_size=2,pp_size=2,zero_stage=1",
            r"zero_stage=1 with pp_size=2 is not built. Leave one",
        ),
        (ZERO1, r"zero_stage=1 divides among replicas, .*Start 4 processes or more"),
        ("colossalai:plugin=zero2,zero_stage=1", r"zero_stage has no meaning .*; hybrid only"),
        (
            "colossalai:plugin=hybrid,tp_size=2,native={zero_stage: 1}",
            r"'zero_stage', which follows from the option 'zero_stage'",
        ),
    ],
)
def test_what_is_not_built_is_refused(strategy: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(strategy)


def check(strategy: str) -> None:
    registry.resolve(strategy).check(EngineSpec(language_model()), Placement(size=2))
