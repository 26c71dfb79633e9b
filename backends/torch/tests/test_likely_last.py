"""Backward passes that are likely to be the last of their step: summed while they run, and again
where another follows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from unipar import ConfigError, Session
from unipar.testing.pool import WorldPools
from unipar.world import Placement

STRATEGIES = [
    "ddp",
    "ddp:find_unused_parameters=true",
    "ddp:find_unused_parameters=true,gradient_as_bucket_view=false",
    "ddp:gradient_as_bucket_view=false",
    "ddp:static_graph=true",
    "ddp:shard_optimizer=true",
    "fsdp",
]
PASSES = (1, 1, 3, 2, 1)
"""Backward passes of each step."""


class Halves(nn.Module):
    """Two layers, of which a pass goes through one, and a third one behind both."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 4), nn.Linear(8, 4)
        self.last = nn.Linear(4, 4) if shared else nn.Identity()

    def forward(self, inputs: torch.Tensor, half: int | None) -> torch.Tensor:
        if half is None:
            return self.last(self.first(inputs) + self.second(inputs))
        return self.last((self.first, self.second)[half](inputs))


def losses_of_steps(half: bool) -> Iterator[list[tuple[torch.Tensor, torch.Tensor, int | None]]]:
    """The same on every rank: inputs and targets of all ranks, for each pass of each step."""
    draw = torch.Generator().manual_seed(0)
    for number in PASSES:
        yield [
            (
                torch.randn(8, 8, generator=draw),
                torch.randn(8, 4, generator=draw),
                index % 2 if half else None,
            )
            for index in range(2 if half else number)
        ]


def plain(half: bool, shared: bool) -> tuple[list[float], list[torch.Tensor]]:
    """One process that has all samples."""
    model = Halves(shared=shared)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    told = []
    for step in losses_of_steps(half):
        optimizer.zero_grad()
        total = 0.0
        for inputs, targets, part in step:
            loss = (model(inputs, part) - targets).square().mean() / len(step)
            loss.backward()
            total += loss.item()
        optimizer.step()
        told.append(total)
    return told, [p.detach() for p in model.parameters()]


def by_hand(
    placement: Placement, strategy: str, likely: bool, half: bool, shared: bool
) -> tuple[list[float], list[torch.Tensor], list[int]]:
    """An engine's loop; its losses, its weights, and the collectives in each ``step()``."""
    with Session(strategy, device="cpu", placement=placement) as session:
        engine: Any = session.prepare(
            Halves(shared=shared),
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2),
        )
        told, calls = [], []
        for step in losses_of_steps(half):
            for inputs, targets, part in step:
                own = slice(placement.rank * 4, placement.rank * 4 + 4)
                loss = (engine(inputs[own], part) - targets[own]).square().mean()
                engine.backward(loss, num_items=4, likely_last=likely, same_parameters=likely)
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reducing:
                told.append(engine.step().loss)
            calls.append(reducing.call_count)
        parts = [part for one in engine.export_state().weights for part in one.read()]
        return told, [part.clone() for part in parts], calls


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_steps_are_those_of_a_plain_loop(strategy: str, world_pool: WorldPools) -> None:
    losses, weights = plain(half=False, shared=True)
    for told, trained, calls in world_pool(2).run(by_hand, strategy, True, False, True):
        assert told == pytest.approx(losses, rel=1e-5)
        if "shard_optimizer" not in strategy and strategy != "fsdp":
            torch.testing.assert_close(trained, weights, rtol=1e-5, atol=1e-6)
        # These reduce what each pass leaves when all have been; FSDP reduces by other calls.
        if strategy not in ("ddp:static_graph=true", STRATEGIES[2], "fsdp"):
            assert calls == [0] * len(PASSES)


def test_without_it_a_step_reduces(world_pool: WorldPools) -> None:
    for _, _, calls in world_pool(2).run(by_hand, "ddp", False, False, True):
        assert all(calls)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("strategy", [one for one in STRATEGIES if "static" not in one])
def test_passes_may_go_through_parts_of_a_model(
    strategy: str, shared: bool, world_pool: WorldPools
) -> None:
    losses, weights = plain(half=True, shared=shared)
    for told, trained, _ in world_pool(2).run(by_hand, strategy, True, True, shared):
        assert told == pytest.approx(losses, rel=1e-5)
        if "shard_optimizer" not in strategy and strategy != "fsdp":
            torch.testing.assert_close(trained, weights, rtol=1e-5, atol=1e-6)


def kept(placement: Placement, strategy: str) -> list[float]:
    """Keep each step's gradients, and compare them with those of the step after."""
    with Session(strategy, device="cpu", placement=placement) as session:
        engine: Any = session.prepare(
            Halves(shared=True),
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        )
        engine.lend_gradients()
        changes, before = [], None
        for step in losses_of_steps(half=False):
            inputs, targets, part = step[0]
            loss = (engine(inputs, part) - targets).square().mean()
            engine.backward(loss, num_items=8, likely_last=True, same_parameters=True)
            engine.step()
            own = [p.grad for p in engine.module.parameters()]
            if before is not None:
                pairs = zip(own, before, strict=True)
                changes.append(max(float((a - b).abs().max()) for a, b in pairs))
            before = own
            for gradient in own:
                # As scripts clear them that are older than `set_to_none`.
                gradient.detach_()
        return changes


@pytest.mark.parametrize("strategy", ["ddp", "ddp:gradient_as_bucket_view=false"])
def test_gradients_that_a_loop_keeps_stay_as_they_were(
    strategy: str, world_pool: WorldPools
) -> None:
    for changes in world_pool(2).run(kept, strategy):
        assert all(change > 1e-3 for change in changes)


def refused(placement: Placement, case: str) -> str:
    """Ranks that differ; what they are told."""
    with Session("ddp", device="cpu", placement=placement) as session:
        engine: Any = session.prepare(
            Halves(shared=True),
            optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        )
        group = engine.optimizer.param_groups[0]

        def go_through(number: int) -> None:
            for _ in range(number):
                loss = engine(torch.ones(2, 8), None).square().mean()
                engine.backward(loss, num_items=2, likely_last=True, same_parameters=True)

        try:
            for step in range(3):
                shorter = case == "passes" and (step, placement.rank) == (1, 1)
                go_through(1 if shorter else 2)
                if case == "rate" and step == 0:
                    group["lr"] = 0.1 * (1 + placement.rank)
                engine.step()
                group["lr"] = 0.1
        except ConfigError as error:
            return str(error)
        return ""


@pytest.mark.parametrize(
    ("case", "told"),
    [("rate", "would step by different hyperparameters"), ("passes", "are in different steps")],
)
def test_ranks_that_differ_are_told(case: str, told: str, world_pool: WorldPools) -> None:
    for said in world_pool(2).run(refused, case):
        assert told in said
