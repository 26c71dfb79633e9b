"""Who writes what is planned once, and again when what ranks hold is another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from unipar.checkpoint.plan import plan_part
from unipar.state import Box, LocalState
from unipar.world import World


def shards(rank: int, cut: int, rows: int = 4) -> list[LocalState]:
    """Two ranks' parts of a tensor, divided at a row."""
    start, size = (0, cut) if rank == 0 else (cut, rows - cut)
    box = Box((start, 0), (size, 3))
    return [LocalState("weight", (rows, 3), torch.float32, (box,), (torch.zeros(size, 3),))]


@pytest.fixture
def told_between(ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What ranks have told each other."""
    (of_ranks,) = ranks(1, type)
    told: list[Any] = []
    gather = of_ranks.gather

    def noted(self: Any, value: Any, axis: str | None = None) -> list[Any]:
        told.append(value)
        return gather(self, value, axis)

    monkeypatch.setattr(of_ranks, "gather", noted)
    return told


def test_boxes_are_told_once_and_when_they_change(
    ranks: Callable[..., list[Any]], told_between: list[Any]
) -> None:
    def plan(cut: int) -> Callable[[World], Any]:
        return lambda world: plan_part("a-part-of-its-own", shards(world.rank, cut), world)

    first = ranks(2, plan(1))
    assert len(told_between) == 4
    again = ranks(2, plan(1))
    assert len(told_between) == 6
    assert again == first
    other = ranks(2, plan(3))
    assert len(told_between) == 10
    assert [other[0].of(rank).items[0].box.sizes for rank in (0, 1)] == [(3, 3), (1, 3)]


def test_a_rank_that_has_forgotten_is_told_again(
    ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from unipar.checkpoint import plan as module

    class Own(dict):
        """What each rank keeps, where ranks are threads of one process."""

        forgetful = -1

        def get(self, key: Any, default: Any = None) -> Any:
            import threading

            rank = getattr(threading.current_thread(), "rank", 0)
            return default if rank == self.forgetful else super().get(key, default)

    kept = Own()
    monkeypatch.setattr(module, "_plans", kept)

    def plan(world: World) -> Any:
        import threading

        threading.current_thread().rank = world.rank  # pyright: ignore[reportAttributeAccessIssue]
        return plan_part("part", shards(world.rank, 2), world)

    first = ranks(2, plan)
    kept.forgetful = 1
    assert ranks(2, plan) == first
