"""Saving takes no more memory than one largest tensor above what a rank holds."""

from __future__ import annotations

import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unipar import Session, checkpoint
from unipar.data.batch import Batch, MicroBatch
from unipar.loss import LossFn, LossSum
from unipar.state import EngineState, LocalState, StateSource
from unipar.strategy import Engine, EngineSpec, StepResult
from unipar.testing.pool import WorldPools
from unipar.world import Placement, join

SHAPES = ((256, 512), (512, 1024), (1024, 128))
LARGEST = 512 * 1024 * 4  # bytes


class PeakBytes(TorchDispatchMode):
    """The most bytes of tensors that were alive at once, of those made inside the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes back as operations on its local tensors
        before = {_address(leaf) for leaf in tree_leaves((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and _address(leaf) not in before | self._known:
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if not nbytes:
            return
        self._known.add(address)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, address, nbytes)

    def _remove(self, address: int, nbytes: int) -> None:
        self._known.discard(address)
        self.now -= nbytes


def _address(value: Any) -> int:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) else 0


class Measured(NamedTuple):
    """Bytes on one rank: the most above what it held before, and what it holds of the state."""

    tensors: int
    objects: int
    held: int


def measure(fn: Callable[[], Any]) -> tuple[int, int]:
    """The most bytes of new tensors, and of Python objects, while ``fn`` runs."""
    tracemalloc.start()
    try:
        with PeakBytes() as tensors:
            fn()
        return tensors.peak, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def held_by(engine: Engine) -> int:
    state = engine.export_state()
    return sum(t.nbytes for own in (*state.weights, *state.optimizer) for t in own.read())


def network() -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in SHAPES))


def train_and_save(placement: Placement, strategy: str, directory: Path) -> dict[str, Measured]:
    with Session(strategy, device="cpu", placement=placement) as session:
        engine = session.prepare(
            network, optimizer=lambda named: torch.optim.AdamW([p for _, p in named])
        )
        batch = Batch((MicroBatch(torch.ones(2, SHAPES[0][0]), 2),), 2 * placement.size)
        engine.train_step(batch, lambda model, x: model(x).square().mean())
        held = held_by(engine)
        # What the first save and load import is no part of them.
        before = directory.with_name("before")
        session.save(before, step=1)
        session.load(before)

        def save_async() -> None:
            checkpoint.save_async(directory, session.engines, session.world, step=2)

        found = {
            "save": Measured(*measure(lambda: session.save(directory, step=1)), held),
            "load": Measured(*measure(lambda: session.load(directory)), held),
            "save_async": Measured(*measure(save_async), held),
        }
        checkpoint.wait_for_pending()
        return found


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("ddp", 2), ("fsdp", 2)])
def test_strategies_stay_within_one_largest_tensor(
    strategy: str, ranks: int, world_pool: WorldPools, tmp_path: Path
) -> None:
    for found in world_pool(ranks).run(train_and_save, strategy, tmp_path):
        largest = LARGEST // ranks if strategy == "fsdp" else LARGEST
        assert found["save"].tensors <= largest
        # The optimizer's moments are made again, and become what is held.
        assert found["load"].tensors <= largest + found["load"].held
        assert found["save_async"].tensors <= found["save_async"].held
        # Headers, digests and the manifest; buffers of data would be megabytes.
        assert found["save"].objects < 1 << 20
        assert found["load"].objects < 2 << 20


class Gathered(LocalState):
    """What a framework that keeps shards of its own layout does: each read makes a whole tensor."""

    def read(self) -> Sequence[torch.Tensor]:
        return tuple(tensor.clone() for tensor in self.tensors)

    @property
    def in_place(self) -> bool:
        return False


class Column(Engine):
    """Weights whose memory is not in the order in which a file holds them."""

    def __init__(self, state: type[LocalState]) -> None:
        self.spec = EngineSpec(nn.Identity())
        self.state = state
        self.tensors = {
            f"layer{i}.weight": torch.randn(a, b).t() for i, (a, b) in enumerate(SHAPES)
        }

    def export_state(self) -> EngineState:
        return EngineState([self.state.of(name, t) for name, t in self.tensors.items()])

    def import_state(self, source: StateSource, *, optimizer: bool = True) -> None:
        source.fill_weights(self.export_state().weights)

    def train_step(self, batch: Batch, loss_fn: LossFn) -> StepResult:
        raise NotImplementedError

    def eval_batch(self, batch: Batch, loss_fn: LossFn) -> LossSum:
        raise NotImplementedError

    def probe(self, microbatch: MicroBatch, loss_fn: LossFn) -> None:
        raise NotImplementedError


def save_columns(placement: Placement, in_place: bool, directory: Path) -> dict[str, Measured]:
    world = join(placement, process_group=False)
    engine = Column(LocalState if in_place else Gathered)
    engines = {"model": engine}
    found = {
        "save": Measured(
            *measure(lambda: checkpoint.save(directory, engines, world, step=1)), held_by(engine)
        ),
        "load": Measured(
            *measure(lambda: checkpoint.load(directory, engines, world)), held_by(engine)
        ),
    }
    for tensor in engine.tensors.values():
        expected = tensor.clone()
        tensor.zero_()
        checkpoint.load(directory, engines, world)
        assert torch.equal(tensor, expected)
    return found


@pytest.mark.parametrize(("in_place", "copies"), [(True, 1), (False, 2)])
def test_engines_that_must_copy_do_so_one_tensor_at_a_time(
    in_place: bool, copies: int, world_pool: WorldPools, tmp_path: Path
) -> None:
    (found,) = world_pool(1).run(save_columns, in_place, tmp_path)
    # An engine's own copy is one, the file's order another; and the measurement sees them.
    assert LARGEST <= found["save"].tensors <= copies * LARGEST
    assert LARGEST <= found["load"].tensors <= copies * LARGEST
