"""A loss that depends on how a batch is divided is told of before it is trained by."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from unipar import LossSum, Objective, Session
from unipar.testing.pool import WorldPools
from unipar.world import Placement

pytestmark = pytest.mark.slow

SAMPLES, BATCH, LENGTH = 16, 8, 12
TOLD = "the loss depends on how a batch is divided, and here it is divided into"


def data() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    xs = torch.randn(SAMPLES, LENGTH, 6, generator=draw)
    ys = torch.randn(SAMPLES, LENGTH, 2, generator=draw)
    lengths = torch.randint(2, LENGTH, (SAMPLES, 1), generator=draw)
    return list(zip(xs, ys, (torch.arange(LENGTH) < lengths).float(), strict=True))


class Net(nn.Module):
    """Has what a call leaves traces in: dropout, batch norm, a count, a weight moved by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.slow = nn.Linear(6, 8).requires_grad_(False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.slow.weight.data.mul_(0.9).add_(self.first.weight.data, alpha=0.1)
        hidden = self.norm((self.first(x) + self.slow(x)).flatten(0, 1)).unflatten(0, x.shape[:2])
        return self.last(nn.functional.dropout(hidden.tanh(), 0.1, self.training))


class Moving(nn.Sequential):
    """The same without batch norm, so that ranks may differ in nothing."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def sgd(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named if p.requires_grad], lr=0.1)


def errors(model: Any, batch: Any) -> torch.Tensor:
    return (model(batch[0]) - batch[1]).square().mean(-1)


def mean(model: Any, batch: Any) -> torch.Tensor:
    return errors(model, batch).mean()


def masked(model: Any, batch: Any) -> torch.Tensor:
    return (errors(model, batch) * batch[2]).sum() / batch[2].sum()


def masked_sum(model: Any, batch: Any) -> LossSum:
    return LossSum((errors(model, batch) * batch[2]).sum(), batch[2].sum())


def contrastive(model: Any, batch: Any) -> torch.Tensor:
    z = nn.functional.normalize(model(batch[0]).mean(1), dim=-1)
    return nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)))


def in_place(model: Any, batch: Any) -> torch.Tensor:
    batch[0].mul_(0.5)
    return mean(model, batch)


COUNTED = Objective(
    lambda batch: batch[0],
    lambda output, batch: ((output - batch[1]).square().mean(-1) * batch[2]).sum() / batch[2].sum(),
    lambda batch: batch[2].sum(),
)


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def train(
    placement: Placement,
    strategy: str,
    build: Callable[[], nn.Module],
    loss: Any,
    micro_batch: int,
    precision: Any = "fp32",
) -> tuple[list[str], list[float]]:
    records = Records()
    log = logging.getLogger("unipar")
    log.addHandler(records)
    try:
        torch.manual_seed(0)
        with Session(strategy, device="cpu", placement=placement, precision=precision) as session:
            engine = session.prepare(build(), optimizer=sgd)
            loader = session.loader(
                data(), global_batch_size=BATCH, micro_batch_size=micro_batch, shuffle=False
            )
            losses = [engine.train_step(batch, loss).loss for batch in loader]
    finally:
        log.removeHandler(records)
    return [one for one in records.said if TOLD in one], losses


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("loss", [masked, contrastive])
def test_rank_0_tells_of_a_loss_of_parts(world_pool: WorldPools, strategy: str, loss: Any) -> None:
    told, others = [
        said for said, _ in world_pool(2).run(train, strategy, Moving, loss, BATCH // 2)
    ]
    assert len(told) == 1
    assert "2 parts: one micro-batch's is" in told[0]
    assert "return unipar.LossSum(sum, number" in told[0]
    assert "one process with" in told[0]
    assert not others


def test_micro_batches_are_parts_and_half_precision_hides_nothing(world_pool: WorldPools) -> None:
    [(told, _)] = world_pool(1).run(train, "single", Moving, masked, BATCH // 2, "bf16")
    assert len(told) == 1
    assert "2 parts" in told[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("loss", [mean, masked_sum, COUNTED], ids=["mean", "sum", "objective"])
def test_a_loss_of_samples_or_items_is_not_told_of(
    world_pool: WorldPools, strategy: str, loss: Any
) -> None:
    for said, _ in world_pool(2).run(train, strategy, Moving, loss, BATCH // 2):
        assert not said


def test_one_part_is_not_told_of(world_pool: WorldPools) -> None:
    [(told, _)] = world_pool(1).run(train, "single", Moving, masked, BATCH)
    assert not told


@pytest.mark.parametrize("loss", [mean, in_place])
def test_what_looks_leaves_no_trace(world_pool: WorldPools, loss: Any) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = sgd(model.named_parameters())
    expected, samples = [], data()
    for first in range(0, SAMPLES, BATCH):
        optimizer.zero_grad()
        total = 0.0
        for start in (first, first + BATCH // 2):
            rows = samples[start : start + BATCH // 2]
            part = loss(model, [torch.stack(column) for column in zip(*rows, strict=True)])
            (part / 2).backward()
            total += part.item() / 2
        optimizer.step()
        expected.append(total)
    [(told, losses)] = world_pool(1).run(train, "single", Net, loss, BATCH // 2)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert not told
