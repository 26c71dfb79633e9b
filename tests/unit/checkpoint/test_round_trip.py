"""What is saved comes back, and what does not fit is listed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unipar.checkpoint import checkpoints, find, load, newest, save, save_async, wait_for_pending
from unipar.errors import CheckpointError, ConfigError
from unipar.state import TensorState
from unipar.world import World

TENSORS = {
    "float": torch.randn(30, 20),
    "half": torch.randn(7).bfloat16(),
    "mask": torch.tensor([True, False, True]),
    "count": torch.tensor(12),
    "none": torch.empty(0, 3),
    "columns": torch.randn(6, 8).t(),
    "every_other": torch.randn(10, 4)[::2],
}


def _zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}


def test_every_kind_of_tensor_comes_back(
    tmp_path: Path, make_engine: Callable[..., Any], alone: World
) -> None:
    saved = make_engine(
        TENSORS, {"float.exp_avg": torch.randn(30, 20)}, extra={"scalars": {"float": {"a": 1}}}
    )
    path = save(
        tmp_path,
        {"m": saved},
        alone,
        step=10,
        progress={"seed": 3, "epoch": 2},
        metrics={"loss": 0.5},
        strategy="ddp",
    )
    assert path == tmp_path / "step-00000010"
    loaded = make_engine(_zeros(), {"float.exp_avg": torch.zeros(30, 20)})
    manifest = load(path, {"m": loaded}, alone)
    for name, tensor in TENSORS.items():
        assert torch.equal(loaded.weights[name], tensor), name
    assert torch.equal(loaded.moments["float.exp_avg"], saved.moments["float.exp_avg"])
    assert (manifest.step, manifest.strategy, manifest.world_size) == (10, "ddp", 1)
    assert manifest.progress == {"seed": 3, "epoch": 2}
    assert manifest.metrics == {"loss": 0.5}
    assert loaded.loaded.extra == {"scalars": {"float": {"a": 1}}}
    assert loaded.loaded.groups == saved.groups
    assert loaded.loaded.optimizer["float"]["exp_avg"].shape == (30, 20)


def test_dtypes_are_converted_to_what_the_engine_holds(
    tmp_path: Path, make_engine: Callable[..., Any], alone: World
) -> None:
    weight = torch.randn(40, 3).bfloat16()
    path = save(tmp_path, {"m": make_engine({"w": weight})}, alone, step=1)
    target = torch.zeros(40, 3)
    load(path, {"m": make_engine({"w": target})}, alone)
    assert torch.equal(target, weight.float())


class _Elsewhere(TensorState):
    """A tensor that is reached through copies only, as where a framework keeps it flat."""

    def read(self) -> Sequence[torch.Tensor]:
        return (self.held.clone(),)  # pyright: ignore[reportAttributeAccessIssue]

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        self.held.copy_(tensors[0])  # pyright: ignore[reportAttributeAccessIssue]


def test_state_that_is_not_memory_of_this_rank_is_read_and_written_through(
    tmp_path: Path, make_engine: Callable[..., Any], alone: World
) -> None:
    def engine(tensor: torch.Tensor) -> Any:
        made = make_engine({"w": tensor})
        (plain,) = made._states({"w": tensor})
        state = _Elsewhere("w", plain.shape, plain.dtype, plain.boxes)
        object.__setattr__(state, "held", tensor)
        made._states = lambda tensors: [state] if tensors else []
        return made

    weight, target = torch.randn(5, 4), torch.zeros(5, 4)
    load(save(tmp_path, {"m": engine(weight)}, alone, step=1), {"m": engine(target)}, alone)
    assert torch.equal(weight, target)


def test_a_step_saved_anew_replaces_the_old(
    tmp_path: Path, make_engine: Callable[..., Any], alone: World
) -> None:
    save(tmp_path, {"m": make_engine({"w": torch.zeros(3)})}, alone, step=1)
    save(tmp_path, {"m": make_engine({"w": torch.ones(3)})}, alone, step=1)
    target = torch.zeros(3)
    load(tmp_path, {"m": make_engine({"w": target})}, alone)
    assert torch.equal(target, torch.ones(3))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_replacement_cut_off_leaves_the_old_step_and_is_undone(
    tmp_path: Path, make_engine: Callable[..., Any], alone: World
) -> None:
    engine = make_engine({"w": torch.ones(3)})
    path = save(tmp_path, {"m": engine}, alone, step=1)
    path.rename(tmp_path / ".old-step-00000001")
    assert newest(tmp_path) == tmp_path / ".old-step-00000001"
    load(tmp_path, {"m": engine}, alone)
    save(tmp_path, {"m": engine}, alone, step=2)
    assert [found.name for found in checkpoints(tmp_path)] == ["step-00000001", "step-00000002"]
    assert find(tmp_path).name == "step-00000002"


def test_differences_are_listed_on_one_screen(
    tmp_path: Path, make_engine: Callable[..., Any], alone: World
) -> None:
    stored = {f"block.{i}.weight": torch.ones(2) for i in range(40)}
    path = save(tmp_path, {"m": make_engine({**stored, "head": torch.ones(4, 2)})}, alone, step=1)
    wanted = {f"blocks.{i}.weight": torch.ones(2) for i in range(40)}
    with pytest.raises(CheckpointError) as info:
        load(path, {"m": make_engine({**wanted, "head": torch.ones(5, 2)})}, alone)
    text = str(info.value)
    assert "head: stored [4, 2], wanted [5, 2]" in text
    assert "missing in the checkpoint (40):" in text
    assert "blocks.0.weight [2] Did you mean 'block.0.weight'?" in text
    assert "in the checkpoint only (40):" in text
    assert "… and 34 more" in text
    assert len(text.splitlines()) <= 24
    assert torch.equal(wanted["blocks.0.weight"], torch.ones(2))


def test_engines_are_found_by_name(
    tmp_path: Path, make_engine: Callable[..., Any], alone: World
) -> None:
    engine = make_engine({"w": torch.ones(1)})
    path = save(tmp_path, {"generator": engine, "critic": engine}, alone, step=1)
    with pytest.raises(CheckpointError, match=r"engines generator, critic, and this run has gen"):
        load(path, {"generator": engine}, alone)
    load(path, {"generator": engine}, alone, optimizer=False)
    with pytest.raises(ConfigError, match="cannot be named 'a/b'"):
        save(tmp_path, {"a/b": engine}, alone, step=2)


def test_tied_weights_are_found_under_their_other_name(
    tmp_path: Path, make_engine: Callable[..., Any], alone: World
) -> None:
    saved = make_engine(
        {"embed": torch.randn(3)}, {"embed.exp_avg": torch.randn(3)}, aliases={"head": "embed"}
    )
    target = make_engine({"head": torch.zeros(3)}, {"head.exp_avg": torch.zeros(3)})
    load(save(tmp_path, {"m": saved}, alone, step=1), {"m": target}, alone)
    assert torch.equal(target.weights["head"], saved.weights["embed"])
    assert torch.equal(target.moments["head.exp_avg"], saved.moments["embed.exp_avg"])


@pytest.mark.parametrize(
    ("progress", "extra", "message"),
    [
        ({"when": {1, 2}}, {}, r"Cannot save progress: .*set is not JSON"),
        ({}, {"scaler": b"x"}, r"Cannot save 'scaler' of engine 'm': .*bytes is not JSON"),
    ],
)
def test_what_is_not_json_is_named(
    tmp_path: Path,
    make_engine: Callable[..., Any],
    alone: World,
    progress: dict[str, Any],
    extra: dict[str, Any],
    message: str,
) -> None:
    engine = make_engine({"w": torch.ones(1)}, extra=extra)
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path, {"m": engine}, alone, step=1, progress=progress)
    assert list(tmp_path.iterdir()) == []


def _draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_random_generators_go_on_where_they_were(
    tmp_path: Path, make_engine: Callable[..., Any], alone: World
) -> None:
    random.gauss(0, 1)
    np.random.randn()
    engine = make_engine({"w": torch.ones(1)})
    path = save(tmp_path, {"m": engine}, alone, step=1)
    first = _draw()
    load(path, {"m": engine}, alone, optimizer=False)
    assert _draw() != first
    load(path, {"m": engine}, alone)
    assert _draw() == first


def test_another_number_of_ranks_reseeds_by_seed_rank_and_step(
    tmp_path: Path,
    make_engine: Callable[..., Any],
    alone: World,
    ranks: Callable[..., list[Any]],
) -> None:
    engine = make_engine({"w": torch.ones(1)})
    draws = []
    for seed, step in ((0, 1), (0, 1), (1, 1), (0, 2)):
        ranks(
            2,
            lambda world, seed=seed, step=step: save(
                tmp_path, {"m": engine}, world, step=step, progress={"seed": seed}
            ),
        )
        load(tmp_path / f"step-{step:08d}", {"m": engine}, alone)
        draws.append(_draw())
    assert draws[0] == draws[1]
    assert len(set(draws)) == 3


def test_a_background_save_holds_what_was_there_when_it_was_asked_for(
    tmp_path: Path, make_engine: Callable[..., Any], alone: World
) -> None:
    weight = torch.ones(2_000_000)
    engine = make_engine({"w": weight})
    pending = save_async(tmp_path, {"m": engine}, alone, step=1)
    weight.zero_()
    second = save_async(tmp_path, {"m": engine}, alone, step=2)
    assert pending.done(), "two saves at once"
    assert second.wait() == tmp_path / "step-00000002"
    load(pending.wait(), {"m": engine}, alone)
    assert torch.equal(weight, torch.ones(2_000_000))


def test_a_background_save_that_fails_says_so_when_waited_for(
    tmp_path: Path, make_engine: Callable[..., Any], alone: World
) -> None:
    engine = make_engine({"w": torch.ones(1)}, extra={"scaler": b"x"})
    pending = save_async(tmp_path, {"m": engine}, alone, step=1)
    with pytest.raises(CheckpointError, match="Cannot save 'scaler'"):
        pending.wait()
    wait_for_pending()
    assert list(tmp_path.iterdir()) == []
