"""What a step that was given up has left inside DeepSpeed is not added to the next one's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from unipar import Session
from unipar.data import Loader
from unipar.errors import ConfigError
from unipar.testing.pool import WorldPools
from unipar.world import Placement


class Broken(Exception):
    """Of the user's own code."""


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.good_calls: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        if self.good_calls == 0:
            raise Broken
        if self.good_calls is not None:
            self.good_calls -= 1
        return self.last(hidden)


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.05)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(84, 4, generator=torch.Generator().manual_seed(1))
    return x, x[:, :1]


@contextlib.contextmanager
def failing_in_forward(module: Any) -> Iterator[None]:
    module.good_calls = 1
    with pytest.raises(Broken):
        yield
    module.good_calls = None


def train(placement: Placement, strategy: str) -> list[tuple[float, float | None]]:
    """Every other step fails, each in another way, after a backward pass."""
    calls = 0

    def second_fails(model: Any, batch: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        loss = loss_fn(model, batch)
        if calls == 2:
            raise Broken
        return loss

    with Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(Network(), optimizer=adamw, max_grad_norm=0.5)
        batches = iter(session.loader(data(), global_batch_size=12, micro_batch_size=2))

        def backward(microbatches: Any) -> None:
            for microbatch in microbatches:
                inputs, targets = microbatch.data
                loss = nn.functional.mse_loss(engine(inputs), targets)
                engine.backward(loss, num_items=len(inputs))

        results = [engine.train_step(next(batches), loss_fn)]
        with pytest.raises(Broken):
            engine.train_step(next(batches), second_fails)
        results.append(engine.train_step(next(batches), loss_fn))
        with failing_in_forward(engine.module):
            engine.train_step(next(batches), loss_fn)
        results.append(engine.train_step(next(batches), loss_fn))
        backward(next(batches).microbatches[:2])
        assert engine.optimizer is not None
        with pytest.raises(ConfigError, match="told to step or to clear gradients"):
            engine.optimizer.step()
        backward(next(batches).microbatches)
        results.append(engine.step())
        return [(result.loss, result.grad_norm) for result in results]


def plain() -> list[tuple[float, float]]:
    model, results = Network(), []
    optimizer = adamw(model.named_parameters())
    for number, batch in enumerate(Loader(data(), global_batch_size=12)):
        if number % 2:
            continue
        optimizer.zero_grad()
        loss = loss_fn(model, batch.microbatches[0].data)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        results.append((loss.item(), norm.item()))
    return results


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("deepspeed:stage=0", marks=pytest.mark.thorough),
        pytest.param("zero1", marks=pytest.mark.thorough),
        pytest.param("zero2", marks=pytest.mark.thorough),
        "zero2:offload_optimizer=true",
        "zero3:persistence_threshold=0",
        pytest.param("zero3:offload_optimizer=true", marks=pytest.mark.thorough),
    ],
)
def test_a_step_that_was_given_up_leaves_nothing(world_pool: WorldPools, strategy: str) -> None:
    expected = torch.tensor(plain())
    for found in world_pool(2).run(train, strategy):
        assert torch.tensor(found) == pytest.approx(expected, rel=1e-5)
