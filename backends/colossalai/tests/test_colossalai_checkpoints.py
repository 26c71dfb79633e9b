"""A run saved under a plugin goes on under PyTorch's own strategies, and the other way around.

Ten steps and a checkpoint under each source; each target then takes ten steps more from each of
them, in one engine that the resumed run before has left in some other state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar import LossSum, Session
from unipar.data import Loader
from unipar.errors import CheckpointError
from unipar.strategy import Engine
from unipar.testing.models import LENGTH, VOCABULARY, Block, sentences
from unipar.testing.pool import WorldPools
from unipar.world import Placement

HALF, STEPS, BATCH, SAMPLES = 10, 20, 8, 52
DDP, ZERO1, ZERO2 = (f"colossalai:plugin={plugin}" for plugin in ("ddp", "zero1", "zero2"))

SOURCES = [("single", 1), ("ddp", 2), ("fsdp", 4), (DDP, 2), (ZERO1, 2), (ZERO2, 2), (ZERO2, 4)]
TARGETS = [("single", 1), ("ddp", 2), ("fsdp", 2), (DDP, 1), (ZERO1, 4), (ZERO2, 1), (ZERO2, 2)]

pytestmark = pytest.mark.slow


class Language(nn.Module):
    """Tied and frozen weights, a scalar one, and a buffer that the loss depends on.

    Its widths divide by neither two nor four, so that ranks hold parts of rows.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCABULARY, 9)
            self.position = nn.Linear(LENGTH, 9, bias=False).requires_grad_(False)
            self.block = Block(9)
            self.factor = nn.Parameter(torch.tensor(1.0 + seed))
            self.head = nn.Linear(9, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.tensor(100.0 * seed))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.block(self.embedding(tokens) + self.position.weight.T)
        self.calls += 1.0
        return self.head(x) * self.factor * (1 + self.calls / 50)


def loss_sum(model: Any, batch: Any) -> LossSum:
    logits, labels = model(batch["tokens"]), batch["labels"]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return LossSum(loss, (labels != -100).sum())


def make_optimizer(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    trained = [(name, p) for name, p in named if p.requires_grad]
    flat = [p for _, p in trained if p.ndim < 2]
    deep = [p for _, p in trained if p.ndim >= 2]
    groups = [{"params": deep}, {"params": flat, "weight_decay": 0.0, "lr": 5e-3}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=[2e-2, 1e-2], total_steps=STEPS + 1
    )


def endless(loader: Loader) -> Iterator[Any]:
    while True:
        yield from loader


def train(engine: Engine, loader: Loader, steps: int) -> list[float]:
    batches = zip(range(steps), endless(loader), strict=False)
    return [engine.train_step(batch, loss_sum).loss for _, batch in batches]


def prepare(session: Session, seed: int) -> tuple[Engine, Loader]:
    engine = session.prepare(
        Language(seed),
        optimizer=make_optimizer,
        lr_scheduler=make_scheduler,
        max_grad_norm=0.5,
    )
    return engine, session.loader(sentences(SAMPLES), global_batch_size=BATCH, shuffle=True)


def train_and_save(placement: Placement, strategy: str, directory: Path) -> None:
    with Session(strategy, device="cpu", placement=placement) as session:
        engine, loader = prepare(session, seed=0)
        train(engine, loader, HALF)
        session.save(directory, loader=loader)


def resume_each(placement: Placement, strategy: str, paths: list[Path]) -> list[list[float]]:
    with Session(strategy, device="cpu", placement=placement) as session:
        engine, loader = prepare(session, seed=1)
        runs = []
        for path in paths:
            assert session.load(path, loader=loader) == HALF
            runs.append(train(engine, loader, STEPS - HALF))
        return runs


@pytest.fixture(scope="module")
def uninterrupted(world_pool: WorldPools) -> list[float]:
    return world_pool(1).run(train_plainly)[0]


def train_plainly(placement: Placement) -> list[float]:
    """A plain loop in one process."""
    model = Language()
    optimizer = make_optimizer(model.named_parameters())
    scheduler = make_scheduler(optimizer)
    losses = []
    loader = Loader(sentences(SAMPLES), global_batch_size=BATCH, shuffle=True)
    for _, batch in zip(range(STEPS), endless(loader), strict=False):
        loss = loss_sum(model, batch.microbatches[0].data)
        mean = loss.total / loss.count
        optimizer.zero_grad()
        mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        losses.append(mean.item())
    return losses


@pytest.fixture(scope="module")
def saved(world_pool: WorldPools, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A checkpoint of step ten from every source."""
    paths = [tmp_path_factory.mktemp(f"source-{number}") for number in range(len(SOURCES))]
    for (strategy, ranks), path in zip(SOURCES, paths, strict=True):
        world_pool(ranks).run(train_and_save, strategy, path)
    return paths


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: f"{t[0]}@{t[1]}")
def test_resumes_what_any_source_has_saved(
    target: tuple[str, int],
    saved: list[Path],
    uninterrupted: list[float],
    world_pool: WorldPools,
) -> None:
    strategy, ranks = target
    for runs in world_pool(ranks).run(resume_each, strategy, saved):
        for source, losses in zip(SOURCES, runs, strict=True):
            assert losses == pytest.approx(uninterrupted[HALF:], rel=1e-5), source


def test_a_checkpoint_of_another_model_is_refused(
    saved: list[Path], world_pool: WorldPools
) -> None:
    with pytest.raises(CheckpointError, match=r"embedding\.weight"):
        world_pool(2).run(load_into_another_model, saved[0])


def load_into_another_model(placement: Placement, path: Path) -> None:
    with Session(ZERO2, device="cpu", placement=placement) as session:
        session.prepare(nn.Linear(2, 2), optimizer=make_optimizer)
        session.load(path)
