"""A run saved under Horovod goes on under PyTorch's strategies on other ranks, and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar import ConfigError, LossSum, Session
from unipar.data import Loader
from unipar.errors import CheckpointError
from unipar.strategy import Engine
from unipar.testing.models import LENGTH, VOCABULARY, Block, sentences
from unipar.testing.pool import WorldPools
from unipar.world import Placement

HALF, STEPS, BATCH = 10, 20, 8
SAMPLES = 52  # does not divide by the batch, and ten steps end inside the second epoch
RELATIVE = 1e-5


class Language(nn.Module):
    """Tied weights, a frozen layer, and a buffer that each step changes and the loss depends on."""

    def __init__(self, *, elsewhere: bool = False, width: int = 9) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(elsewhere))
            self.embedding = nn.Embedding(VOCABULARY, width)
            self.position = nn.Linear(LENGTH, width, bias=False).requires_grad_(False)
            self.block = Block(width)
            self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.tensor(100.0 if elsewhere else 0.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.block(self.embedding(tokens) + self.position.weight.T)
        self.calls += 1.0
        return self.head(x) * (1 + self.calls / 50)


def loss_sum(model: Any, batch: Any) -> LossSum:
    logits, labels = model(batch["tokens"]), batch["labels"]
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return LossSum(loss, (labels != -100).sum())


def prepare(session: Session, *, elsewhere: bool, width: int = 9) -> tuple[Engine, Loader]:
    engine = session.prepare(
        Language(elsewhere=elsewhere, width=width),
        optimizer=lambda named: torch.optim.AdamW(
            [p for _, p in named if p.requires_grad], lr=1e-2, weight_decay=0.1
        ),
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7),
        max_grad_norm=0.5,
    )
    loader = session.loader(sentences(SAMPLES), global_batch_size=BATCH, shuffle=True)
    return engine, loader


def train(engine: Engine, loader: Loader, steps: int) -> list[float]:
    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    batches = endless()
    return [engine.train_step(next(batches), loss_sum).loss for _ in range(steps)]


def train_and_save(placement: Placement, strategy: str, directory: Path) -> list[float]:
    with Session(strategy, device="cpu", placement=placement) as session:
        engine, loader = prepare(session, elsewhere=False)
        losses = train(engine, loader, HALF)
        session.save(directory, loader=loader)
        return losses + train(engine, loader, STEPS - HALF)


def resume(placement: Placement, strategy: str, path: Path, width: int = 9) -> list[float]:
    with Session(strategy, device="cpu", placement=placement) as session:
        engine, loader = prepare(session, elsewhere=True, width=width)
        assert session.load(path, loader=loader) == HALF
        return train(engine, loader, STEPS - HALF)


@pytest.fixture(scope="module")
def saved(
    world_pool: WorldPools, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, list[float]]]:
    """A checkpoint of step ten and all losses, by strategy and ranks."""
    found = {}
    for strategy, ranks in (("single", 1), ("horovod", 2), ("ddp", 2), ("fsdp", 2)):
        directory = tmp_path_factory.mktemp(strategy)
        losses = world_pool(ranks).run(train_and_save, strategy, directory)[0]
        found[strategy] = directory, losses
    return found


@pytest.mark.parametrize(
    ("source", "target", "ranks"),
    [
        ("horovod", "fsdp", 4),
        ("fsdp", "horovod", 2),
        *(("horovod", "horovod", ranks) for ranks in (1, 4)),
        *(
            pytest.param(*one, marks=pytest.mark.thorough)
            for one in (
                ("horovod", "ddp", 2),
                ("horovod", "single", 1),
                ("single", "horovod", 2),
                ("ddp", "horovod", 2),
                ("horovod", "horovod", 2),
            )
        ),
    ],
)
def test_goes_on_under_another_strategy_or_number_of_ranks(
    saved: dict[str, tuple[Path, list[float]]],
    world_pool: WorldPools,
    source: str,
    target: str,
    ranks: int,
) -> None:
    _, uninterrupted = saved["single"]
    path, losses = saved[source]
    assert losses == pytest.approx(uninterrupted, rel=RELATIVE)
    for of_rank in world_pool(ranks).run(resume, target, path):
        assert of_rank == pytest.approx(uninterrupted[HALF:], rel=RELATIVE)


def test_a_checkpoint_of_another_model_is_refused(
    saved: dict[str, tuple[Path, list[float]]], world_pool: WorldPools
) -> None:
    with pytest.raises((CheckpointError, ConfigError), match="shape"):
        world_pool(2).run(resume, "horovod", saved["ddp"][0], 7)
