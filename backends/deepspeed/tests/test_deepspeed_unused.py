"""Parameters that no rank uses in a step: as elsewhere, or not at all, but never something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unipar import Session, fit
from unipar.data import Loader
from unipar.errors import ConfigError
from unipar.testing.pool import WorldPools
from unipar.world import Placement


class Sometimes(nn.Module):
    """Uses its second layer in every other step."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.always = nn.Linear(4, 8)
            self.sometimes = nn.Linear(4, 8)
            self.last = nn.Linear(8, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.always(x)
        if self.calls % 2:
            hidden = hidden + self.sometimes(x)
        return self.last(hidden.tanh())


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def adamw(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=0.1, weight_decay=0.1)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    return x, x[:, :1]


def train(placement: Placement, strategy: str) -> list[float]:
    with Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(Sometimes(), optimizer=adamw)
        loader = session.loader(data(), global_batch_size=8)
        return [engine.train_step(batch, loss_fn).loss for batch in loader]


def plain(*, zeros: bool) -> list[float]:
    model, losses = Sometimes(), []
    optimizer = adamw(model.named_parameters())
    for batch in Loader(data(), global_batch_size=8):
        optimizer.zero_grad()
        loss = loss_fn(model, batch.microbatches[0].data)
        loss.backward()
        for parameter in model.parameters():
            if zeros and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_without_zero_they_stay_as_they_are(world_pool: WorldPools) -> None:
    for losses in world_pool(2).run(train, "deepspeed:stage=0"):
        assert losses == pytest.approx(plain(zeros=False), rel=1e-5)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("strategy", ["zero1", "zero3:offload_optimizer=true"])
def test_zero_stops_and_names_them(world_pool: WorldPools, strategy: str, ranks: int) -> None:
    with pytest.raises(ConfigError, match=r"'sometimes.weight', 'sometimes.bias' in this step.*Fr"):
        world_pool(ranks).run(train, strategy)


def test_zeros_are_zeros_where_asked_for(world_pool: WorldPools) -> None:
    for losses in world_pool(2).run(train, "zero2:unused_parameters=zero_gradient"):
        assert losses == pytest.approx(plain(zeros=True), rel=1e-5)


@pytest.mark.parametrize("strategy", ["zero3:", "zero2:offload_optimizer=true,"])
def test_zeros_are_refused_where_they_would_be_something_else(
    tmp_path: Path, strategy: str
) -> None:
    with pytest.raises(ConfigError, match=r"gradients of an earlier step"):
        fit(
            Sometimes(),
            data(),
            strategy=f"{strategy}unused_parameters=zero_gradient",
            loss=loss_fn,
            global_batch_size=8,
            steps=1,
            devices=2,
            device="cpu",
            output_dir=tmp_path,
        )


class Skipping(nn.Module):
    """Blocks of one size, of which each rank leaves out its own from a given step on."""

    def __init__(self, skip: int, after: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.last = nn.Linear(4, 1)
        self.skip, self.left = skip, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        for index, layer in enumerate(self.layers):
            if self.left >= 0 or index != self.skip:
                x = layer(x).tanh()
        return self.last(x)


def skip_layers(placement: Placement, strategy: str, skip: tuple[int, int], after: int) -> Any:
    losses = []
    try:
        with Session(strategy, device="cpu", placement=placement) as session:
            model = Skipping(skip[placement.rank], after)
            engine = session.prepare(model, optimizer=adamw)
            for batch in session.loader(data(), global_batch_size=8):
                losses.append(engine.train_step(batch, loss_fn).loss)
    except ConfigError as error:
        return len(losses), str(error)
    return len(losses), ""


@pytest.mark.parametrize(
    ("strategy", "after"),
    [
        ("zero1", 0),
        ("zero1", 2),
        ("zero2", 2),
        ("zero2:unused_parameters=zero_gradient", 2),
        # Later, stage 3 gathers ahead what the step before has used, and other sizes meet.
        ("zero3", 0),
    ],
)
def test_ranks_that_use_different_ones_are_told(
    world_pool: WorldPools, strategy: str, after: int
) -> None:
    found = world_pool(2).run(skip_layers, strategy, (1, 2), after)
    for rank, (steps, said) in enumerate(found):
        assert steps == after
        assert f"rank {rank} has used other parameters than another rank" in said
        assert f"It has not used 'layers.{rank + 1}.weight', 'layers.{rank + 1}.bias'." in said


def test_each_rank_may_use_its_own_without_zero(world_pool: WorldPools) -> None:
    assert world_pool(2).run(skip_layers, "deepspeed:stage=0", (1, 2), 0) == [(8, "")] * 2


def thaw(placement: Placement, strategy: str) -> str:
    with Session(strategy, device="cpu", placement=placement) as session:
        model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 1))
        engine = session.prepare(
            model, optimizer=lambda named: adamw((n, p) for n, p in named if p.requires_grad)
        )
        batches = iter(session.loader(data(), global_batch_size=8))
        engine.train_step(next(batches), loss_fn)
        engine.module.requires_grad_(True)
        with pytest.raises(ConfigError) as refused:
            engine.train_step(next(batches), loss_fn)
        return str(refused.value)


@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_a_parameter_thawed_after_prepare_is_named(world_pool: WorldPools, strategy: str) -> None:
    for said in world_pool(2).run(thaw, strategy):
        assert "0.weight, 0.bias was frozen when the model was prepared" in said
