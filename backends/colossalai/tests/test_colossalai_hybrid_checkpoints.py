"""A run saved from shards and stages goes on anywhere, and any other goes on in them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from colossalai_hybrid import BOTH, PP, TP, prepare, take
from colossalai_models import adamw, language_model, plain_loop

from unipar import Session
from unipar.checkpoint import load_model
from unipar.errors import CheckpointError
from unipar.testing.checkpoints import ring
from unipar.testing.compare import assemble_weights
from unipar.testing.harness import Exported
from unipar.testing.pool import WorldPools
from unipar.testing.portability import Where
from unipar.world import Placement

pytestmark = pytest.mark.slow

HALF, STEPS = 7, 14
SINGLE = Where("single", 1)
SOURCES = {
    False: [SINGLE, Where("fsdp", 2), Where(TP, 2), Where(BOTH, 4)],
    True: [SINGLE, Where("colossalai:plugin=zero2", 2), Where(TP, 4), Where(PP, 2)],
}
"""Of a model with tied embeddings, or without."""
TARGETS = [
    *(Where("single", 1), Where("ddp", 2), Where("fsdp", 4)),
    *(Where(TP, 2), Where(PP, 4), Where(BOTH, 4)),
]


def train_and_save(placement: Placement, strategy: str, tied: bool, directory: Path) -> None:
    with Session(strategy, device="cpu", placement=placement) as session:
        engine, loader = prepare(session, language_model(tie_word_embeddings=tied))
        take(engine, loader, HALF)
        session.save(directory, loader=loader)


def resume_each(
    placement: Placement, strategy: str, tied: bool, paths: list[Path]
) -> list[list[float]]:
    with Session(strategy, device="cpu", placement=placement) as session:
        engine, loader = prepare(session, language_model(tie_word_embeddings=tied, seed=1))
        runs = []
        for path in paths:
            assert session.load(path, loader=loader) == HALF
            runs.append([step.loss for step in take(engine, loader, STEPS - HALF)])
        return runs


@functools.cache
def uninterrupted(tied: bool) -> list[float]:
    return [step.loss for step in plain_loop(language_model(tie_word_embeddings=tied), STEPS)]


Saved = tuple[bool, dict[Where, Path]]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def saved(
    request: pytest.FixtureRequest,
    world_pool: WorldPools,
    tmp_path_factory: pytest.TempPathFactory,
) -> Saved:
    tied: bool = request.param
    root = tmp_path_factory.mktemp("saved")
    paths = {where: root / str(number) for number, where in enumerate(SOURCES[tied])}
    for where, path in paths.items():
        world_pool(where.ranks).run(train_and_save, where.strategy, tied, path)
    return tied, paths


def assert_goes_on(
    target: Where, sources: Sequence[Where], saved: Saved, pools: WorldPools
) -> None:
    tied, paths = saved
    wanted = uninterrupted(tied)[HALF:]
    own = [paths[source] for source in sources]
    for runs in pools(target.ranks).run(resume_each, target.strategy, tied, own):
        for source, losses in zip(sources, runs, strict=True):
            assert losses == pytest.approx(wanted, rel=1e-5), f"{source} -> {target}"


@pytest.mark.parametrize("number", range(len(TARGETS)), ids=map(str, TARGETS))
def test_resumes_what_one_source_has_saved(
    number: int, saved: Saved, world_pool: WorldPools
) -> None:
    source, target = ring(TARGETS, SOURCES[saved[0]])[number]
    assert_goes_on(target, [source], saved, world_pool)


@pytest.mark.thorough
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_resumes_what_any_source_has_saved(
    target: Where, saved: Saved, world_pool: WorldPools
) -> None:
    assert_goes_on(target, SOURCES[saved[0]], saved, world_pool)


def test_a_whole_model_takes_the_weights(saved: Saved) -> None:
    tied, paths = saved
    whole, divided = (
        load_model(paths[where], language_model(seed=2, tie_word_embeddings=tied))
        for where in (SINGLE, SOURCES[tied][-1])
    )
    for (name, own), other in zip(
        divided.state_dict().items(), whole.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-6, msg=name)


def test_a_checkpoint_of_another_model_is_refused(saved: Saved, world_pool: WorldPools) -> None:
    _, paths = saved
    with pytest.raises(CheckpointError, match=r"layers\.2"):
        world_pool(2).run(load_into_another_model, paths[SINGLE])


def load_into_another_model(placement: Placement, path: Path) -> None:
    with Session(TP, device="cpu", placement=placement) as session:
        session.prepare(language_model(num_hidden_layers=2), optimizer=adamw)
        session.load(path)


@pytest.mark.parametrize("vocabulary", [64, 65, 100])
def test_padding_of_the_vocabulary_is_not_exported(vocabulary: int, world_pool: WorldPools) -> None:
    """64 rows are padded to 128, so that a shard is as large as the whole, and the other empty."""
    parts = world_pool(2).run(export, TP, vocabulary)
    whole = language_model(vocab_size=vocabulary).state_dict()
    assembled = assemble_weights(parts)
    assert assembled.keys() == whole.keys()
    for name, tensor in assembled.items():
        assert torch.equal(tensor, whole[name]), name


def export(placement: Placement, strategy: str, vocabulary: int) -> Exported:
    with Session(strategy, device="cpu", placement=placement) as session:
        return Exported.of(session.prepare(language_model(vocab_size=vocabulary)))
