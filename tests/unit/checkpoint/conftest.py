"""Engines of plain tensors, and ranks that are threads: the arithmetic without the processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from measure.fuzzing.versions import as_version_1, sealed
from unipar.state import Box, EngineState, GroupState, LocalState, StateSource, TensorState
from unipar.world import Placement, World

T = TypeVar("T")


class TensorEngine:
    """Holds whole tensors, or parts of them where ``divide`` says which."""

    optimizer = lr_scheduler = None

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        moments: Mapping[str, torch.Tensor] | None = None,
        *,
        boxes: Mapping[str, Sequence[Box]] | None = None,
        extra: dict[str, Any] | None = None,
        aliases: dict[str, str] | None = None,
    ) -> None:
        self.weights, self.moments = dict(weights), dict(moments or {})
        self.boxes = boxes
        self.extra, self.aliases = extra or {}, aliases or {}
        self.groups = (GroupState(tuple(weights), {"lr": 0.1, "betas": [0.9, 0.99]}),)
        self.loaded: StateSource | None = None

    def _states(self, tensors: Mapping[str, torch.Tensor]) -> list[TensorState]:
        states: list[TensorState] = []
        for name, tensor in tensors.items():
            if self.boxes is None:
                states.append(LocalState.of(name, tensor))
                continue
            own = tuple(self.boxes[name])
            parts = tuple(
                tensor[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))] for box in own
            )
            states.append(LocalState(name, tuple(tensor.shape), tensor.dtype, own, parts))
        return states

    def export_state(self) -> EngineState:
        return EngineState(
            self._states(self.weights),
            self._states(self.moments),
            self.groups,
            self.extra,
            self.aliases,
        )

    def import_state(self, source: StateSource, *, optimizer: bool = True) -> None:
        self.loaded = source
        source.fill_weights(self._states(self.weights))
        if optimizer:
            source.fill_optimizer(self._states(self.moments))


class ThreadWorld(World):
    """A rank that is a thread of this process."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, board: list[Any]) -> None:
        super().__init__(Placement(rank=rank, size=size))
        self._barrier, self._board = barrier, board

    def gather(self, value: Any, axis: str | None = None) -> list[Any]:
        assert axis is None
        self._board[self.rank] = value
        self._barrier.wait(timeout=60)
        values = list(self._board)
        self._barrier.wait(timeout=60)
        return values


def on_ranks(size: int, work: Callable[[World], T]) -> list[T | Exception]:
    """What ``work`` returns or raises on each of ``size`` ranks; a rank that hangs fails."""
    barrier, board = threading.Barrier(size), [None] * size
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadWorld(rank, size, barrier, board))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=90)
        assert not thread.is_alive(), "a rank hangs"
    return results


@pytest.fixture
def alone() -> World:
    return World(Placement())


@pytest.fixture
def make_engine() -> Callable[..., Any]:
    """Typed loosely: a stand-in has only what a checkpoint asks of an engine."""
    return TensorEngine


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    return on_ranks


@pytest.fixture
def seal() -> Callable[..., None]:
    return sealed


@pytest.fixture
def make_old() -> Callable[[Path], None]:
    return as_version_1
