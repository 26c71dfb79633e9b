"""Ranks that differ: as a launcher has started them, told at the start; or in a step, before it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import accuracy, build, data, fit_in_world, make_scheduler
from told import warned_of
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from unipar import Session
from unipar.data.batch import Batch, MicroBatch
from unipar.errors import ConfigError
from unipar.strategy import Engine
from unipar.testing.pool import WorldPools
from unipar.train.agreement import differences
from unipar.world import Placement


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        samples = data()
        yield from (samples[index] for index in range(len(samples)))


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "length": (
        {"samples": data(20)},
        "data: a dataset of 28 samples on rank 0; a dataset of 20 samples on rank 1",
    ),
    "kind": ({"samples": Stream()}, "data: a dataset of 28 samples on rank 0; a stream on rank 1"),
    "loader": (
        {"samples": DataLoader(data(), batch_size=8)},
        "data: a dataset of 28 samples on rank 0; a dataset of 28 samples, in order on rank 1",
    ),
    "shuffle": ({"shuffle": False}, "shuffle: None on rank 0; False on rank 1"),
    "eval_data": (
        {"eval_data": data(8), "metrics": {"accuracy": accuracy}},
        "eval_data: None on rank 0; a dataset of 8 samples on rank 1",
    ),
    "steps": ({"steps": 5}, "steps: 6 on rank 0; 5 on rank 1"),
    "lr_scheduler": (
        {"lr_scheduler": make_scheduler},
        "lr_scheduler: None on rank 0; given on rank 1",
    ),
    "every_steps": ({"checkpoint": {"every_steps": 2}}, "checkpoint: "),
}


def test_what_differs_is_told_to_every_rank(world_pool: WorldPools, tmp_path: Path):
    def task(placement: Placement) -> list[str]:
        told: list[str] = []
        for changes, _ in CASES.values():
            own = changes if placement.rank == 1 else {}
            values: dict[str, Any] = {"strategy": "ddp", "checkpoint": {}, **own}
            with pytest.raises(ConfigError) as caught:
                fit_in_world(placement, tmp_path, build(), **values)
            told.append(str(caught.value))
        return told

    first, second = world_pool(2).run(task)
    assert first == second
    for message, (_, line) in zip(first, CASES.values(), strict=True):
        assert "the ranks of this run were not all started with the same" in message
        assert line in message
        assert "give each all of the data" in message


def test_what_belongs_to_one_machine_may_differ(world_pool: WorldPools, tmp_path: Path):
    def task(placement: Placement) -> int:
        changes = {"num_workers": placement.rank, "log_every": 1 + placement.rank, "steps": 1}
        return len(fit_in_world(placement, tmp_path, strategy="ddp", **changes).losses)

    assert world_pool(2).run(task) == [1, 1]


def test_many_ranks_are_told_in_ranges():
    started = [{"steps": 4 if rank in (3, 7, 8, 9) else 5} for rank in range(64)]
    message = differences(started)
    assert message is not None
    assert "steps: 5 on ranks 0-2, 4-6, 10-63; 4 on ranks 3, 7-9" in message
    assert differences(started[:3]) is None


def rates(placement: Placement, strategy: str, by_hand: bool) -> tuple[str, list[bool]]:
    """Halve one rank's rate, then all ranks'; what is told, and whether steps changed weights."""
    with Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(
            nn.Linear(2, 2), optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
        )
        assert engine.optimizer is not None
        inputs = torch.full((1, 2), 1.0 + placement.rank)
        batch, changed = Batch((MicroBatch(inputs, 1),), 2), []

        def step() -> None:
            before = own_part(engine)
            try:
                if by_hand:
                    engine.backward(square(engine, inputs), num_items=1)
                    engine.step()
                else:
                    engine.train_step(batch, square)
            finally:
                changed.append(not torch.equal(before, own_part(engine)))

        step()
        engine.optimizer.param_groups[0]["lr"] = 0.1 - 0.05 * placement.rank
        with pytest.raises(ConfigError) as caught:
            step()
        engine.optimizer.param_groups[0]["lr"] = 0.05
        step()
        return str(caught.value), changed


def square(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    return model(inputs).square().mean()


def own_part(engine: Engine) -> torch.Tensor:
    parts = [part for one in engine.export_state().weights for part in one.read()]
    return torch.cat([part.flatten() for part in parts]).clone()


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rate_that_one_rank_has_changed_is_refused_before_the_step(
    strategy: str, by_hand: bool, world_pool: WorldPools
) -> None:
    for told, changed in world_pool(2).run(rates, strategy, by_hand):
        assert (
            "different hyperparameters: lr of group 0 is 0.1 on rank 0, and 0.05 on rank 1" in told
        )
        assert "Change them on all ranks alike" in told
        assert changed == [True, False, True]


def late_rates(placement: Placement) -> list[str]:
    """Change one rank's rate between the last backward pass and the step, and put it right."""
    with Session("ddp", device="cpu", placement=placement) as session:
        engine = session.prepare(
            nn.Linear(2, 2), optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1)
        )
        assert engine.optimizer is not None
        told = []
        for lowered in (0.0, 0.05, 0.0, 0.0):
            group = engine.optimizer.param_groups[0]
            try:
                with engine.microbatch(last=True):
                    engine.backward(square(engine, torch.ones(1, 2)), num_items=1)
                group["lr"] = 0.1 - lowered * placement.rank
                engine.step()
            except ConfigError as error:
                told.append(str(error))
            else:
                told.append("")
            group["lr"] = 0.1
        return told


def test_a_rate_that_was_changed_after_the_backward_pass_is_found_by_the_next_step(
    world_pool: WorldPools,
) -> None:
    for told in world_pool(2).run(late_rates):
        assert told[:2] == ["", ""]
        assert "they did so in the step before, and are alike again. Nothing was updated" in told[2]
        assert told[3] == ""


class Codebook(nn.Module):
    """Moves a codebook, a buffer or a weight of its own, to what it has of each batch."""

    calls: torch.Tensor

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept = kept
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2) if kept == "norm" else nn.Identity()
        if kept == "weight":
            self.book = nn.Parameter(torch.zeros(2))
        else:
            self.register_buffer("book", torch.zeros(2))
            self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.norm(self.linear(x))
        if self.kept in ("buffer", "weight"):
            self.book.data.lerp_(output.detach().mean(0), 0.1)
        elif self.kept == "steps":
            self.calls.add_(1)
        return output + self.book


def keeping(placement: Placement, strategy: str, kept: str) -> tuple[list[str], str]:
    """What a rank logs in four steps, of different samples, and how they end."""
    with (
        warned_of() as said,
        Session(strategy, device="cpu", placement=placement) as session,
    ):
        torch.manual_seed(0)
        engine = session.prepare(Codebook(kept), optimizer="SGD")
        for step in range(4):
            x = torch.arange(6.0).reshape(2, 3) * (1 + placement.rank) + step
            batch = Batch((MicroBatch((x, x[:, :2]), 2),), 4)
            try:
                engine.train_step(batch, squared_error)
            except ConfigError as error:
                return said, str(error)
    return said, ""


def squared_error(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


@pytest.mark.parametrize("strategy", ["ddp", "ddp:broadcast_buffers=false", "fsdp", "horovod"])
@pytest.mark.parametrize("kept", ["norm", "buffer", "steps"])
def test_buffers_that_depend_on_the_number_of_ranks_are_told_once(
    strategy: str, kept: str, world_pool: WorldPools
) -> None:
    (first, ended), (second, other) = world_pool(2).run(keeping, strategy, kept)
    assert ended == other == ""
    assert second == []
    if kept == "steps":
        assert first == []
        return
    (line,) = first
    names = "norm.running_mean, norm.running_var" if kept == "norm" else "book"
    assert f"in buffers ({names}), and each of 2 ranks has a part of a batch" in line
    assert "losses depend on how many ranks there are" in line


def test_weights_that_ranks_change_by_themselves_are_refused(world_pool: WorldPools) -> None:
    """A codebook that is a weight, and moves through ``.data``, which PyTorch does not count."""
    for said, ended in world_pool(2).run(keeping, "ddp:find_unused_parameters=true", "weight"):
        assert said == []
        assert "the ranks have unlike weights book: something other than the optimizer" in ended
        assert "as nn.Embedding(max_norm=…) does" in ended
        assert "not through weight.data, by values that all ranks have" in ended
