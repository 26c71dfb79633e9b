"""Fused optimizers, the default on GPUs, train as PyTorch's own default does; here on CPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plain import BATCH, batches, build, loss_fn
from torch import nn

from unipar.data.batch import Batch, MicroBatch
from unipar.optimizers import fused
from unipar.optimizers.named import NamedOptimizer
from unipar.strategy import EngineSpec, Precision, registry
from unipar.world import Placement

OPTIONS: dict[str, dict[str, Any]] = {
    "adam": {"lr": 1e-2},
    "adamw": {"lr": 1e-2, "amsgrad": True},
    "sgd": {"lr": 1e-1, "weight_decay": 1e-2},
}


def plainly(name: str) -> list[float]:
    """The hand-written loop; nothing of unipar in it."""
    model = build()
    classes: Any = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    optimizer = classes[name](model.parameters(), foreach=False, **OPTIONS[name])
    losses = []
    for inputs, targets in batches():
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def engine_of(placement: Placement, strategy: str, name: str, precision: Precision) -> Any:
    prepared = registry.resolve(strategy)
    world = prepared.setup(placement)
    optimizer = NamedOptimizer(name, OPTIONS[name])
    usual, fused.DEVICE_TYPES = fused.DEVICE_TYPES, frozenset({"cpu"})
    try:
        spec = EngineSpec(build(), optimizer, precision=precision)
        return prepared.prepare(spec, world), world
    finally:
        fused.DEVICE_TYPES = usual


def part(placement: Placement, pair: Any) -> Batch:
    own = tuple(tensor[placement.rank :: placement.size] for tensor in pair)
    return Batch((MicroBatch(own, len(own[0])),), BATCH)


def train(placement: Placement, strategy: str, name: str) -> tuple[list[float], list[Any]]:
    engine, world = engine_of(placement, strategy, name, "fp32")
    losses = [engine.train_step(part(placement, pair), loss_fn).loss for pair in batches()]
    world.leave()
    return losses, [group["fused"] for group in engine.optimizer.param_groups]


@pytest.mark.parametrize("strategy", ["ddp", "ddp:shard_optimizer=true", "fsdp"])
@pytest.mark.parametrize("name", list(OPTIONS))
def test_it_trains_as_the_plain_loop(world_pool: Any, strategy: str, name: str) -> None:
    losses, found = world_pool(2).run(train, strategy, name)[0]
    # PyTorch has no rule for SGD's kernel on divided tensors.
    assert found == [None if (strategy, name) == ("fsdp", "sgd") else True]
    assert losses == pytest.approx(plainly(name), rel=1e-5)


def overflow(placement: Placement, strategy: str) -> tuple[list[bool], bool]:
    engine, world = engine_of(placement, strategy, "adamw", "fp16")
    pair = batches()[0]

    def huge(model: Any, batch: Any) -> torch.Tensor:
        return model(batch[0])[:, 2].float().sum() * 6e4

    def small(model: Any, batch: Any) -> torch.Tensor:
        return model(batch[0]).mean() * 1e-3

    def weights() -> list[torch.Tensor]:
        return [p.detach().clone() for p in engine.module.parameters()]

    before = weights()
    skipped = [engine.train_step(part(placement, pair), huge).skipped]
    kept = all(torch.equal(a, b) for a, b in zip(before, weights(), strict=True))
    skipped += [engine.train_step(part(placement, pair), small).skipped for _ in range(16)]
    world.leave()
    return [skipped[0], skipped[-1]], kept


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_step_that_overflows_in_fp16_changes_nothing(world_pool: Any, strategy: str) -> None:
    for skipped, kept in world_pool(2).run(overflow, strategy):
        assert skipped == [True, False]
        assert kept
