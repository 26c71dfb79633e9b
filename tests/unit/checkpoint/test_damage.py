"""What is damaged is found and named, and nothing in a checkpoint is ever executed."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from unipar.checkpoint import load, newest, save, verify
from unipar.checkpoint.files import digest
from unipar.errors import CheckpointError
from unipar.state import Box
from unipar.world import World

Files = ["m/weights/rank-00000.safetensors", "m/optimizer/rank-00000.safetensors"]


@pytest.fixture
def engine(make_engine: Callable[..., Any]) -> Any:
    return make_engine(
        {"layer.weight": torch.randn(700, 500), "layer.bias": torch.randn(5)},
        {"layer.weight.exp_avg": torch.randn(700, 500), "layer.weight.step": torch.tensor(3.0)},
    )


@pytest.fixture
def path(tmp_path: Path, engine: Any, alone: World) -> Path:
    save(tmp_path, {"m": engine}, alone, step=4)
    return save(tmp_path, {"m": engine}, alone, step=5)


def _flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)


@pytest.mark.parametrize("name", [*Files, "rng/rank-00000.json"])
@pytest.mark.parametrize("where", [0.0, 0.0001, 0.5, 0.97, 1.0])
def test_a_flipped_bit_anywhere_is_found_and_the_file_named(
    path: Path, engine: Any, alone: World, name: str, where: float
) -> None:
    file = path / name
    _flip(file, int(where * (file.stat().st_size - 1)))
    with pytest.raises(CheckpointError, match=f"{name} is damaged: the checksum of .* differs"):
        load(path, {"m": engine}, alone)
    with pytest.raises(CheckpointError, match=name):
        verify(path)


def test_a_flipped_bit_in_data_names_the_tensor(path: Path, engine: Any, alone: World) -> None:
    _flip(path / Files[0], 900_000)
    with pytest.raises(CheckpointError, match=r"the checksum of tensor 'layer.weight' differs"):
        load(path, {"m": engine}, alone)


@pytest.mark.parametrize("name", Files)
def test_a_truncated_file_is_found_and_passed_over(
    path: Path, engine: Any, alone: World, name: str
) -> None:
    file = path / name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=rf"tensor 'layer.*{name}.*bytes and should have"):
        load(path, {"m": engine}, alone)
    assert newest(path.parent) == path.with_name("step-00000004")


@pytest.mark.parametrize("name", Files)
def test_a_missing_file_is_found_and_passed_over(
    path: Path, engine: Any, alone: World, name: str
) -> None:
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=rf"tensor 'layer.*{name}: No such file"):
        load(path, {"m": engine}, alone)
    assert newest(path.parent) == path.with_name("step-00000004")


@pytest.mark.parametrize("at", [3, 20, 40, 900])
def test_a_flipped_bit_in_the_manifest_is_found_and_passed_over(
    path: Path, engine: Any, alone: World, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    _flip(path / "manifest.json", at)
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged: its checksum differs"):
        load(path, {"m": engine}, alone)
    assert newest(path.parent) == path.with_name("step-00000004")
    assert "Passing over" in caplog.text


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"{}", b"[1]\n"])
def test_a_manifest_that_is_something_else_is_refused(
    path: Path, engine: Any, alone: World, text: bytes
) -> None:
    (path / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"manifest.json is damaged"):
        load(path, {"m": engine}, alone)


def test_a_newer_format_is_refused_with_what_to_do(path: Path, engine: Any, alone: World) -> None:
    file = path / "manifest.json"
    body = json.loads(file.read_bytes())
    body.pop("checksum")
    body["version"], body["unipar"] = 99, "7.0.0"
    rest = json.dumps(body)[1:].encode()
    file.write_bytes(f'{{"checksum":"{digest(rest)}",\n'.encode() + rest)
    with pytest.raises(CheckpointError, match=r"version 99, written by unipar 7.0.0.*Upgrade"):
        load(path, {"m": engine}, alone)


def test_damage_that_one_rank_sees_is_raised_on_all(
    path: Path, make_engine: Callable[..., Any], ranks: Callable[..., list[Any]], engine: Any
) -> None:
    _flip(path / Files[0], 1_300_000)  # in the second half of layer.weight
    halves = [[Box((0, 0), (350, 500))], [Box((350, 0), (350, 500))]]

    def load_half(world: Any) -> Any:
        boxes = {name: [Box((0,) * t.dim(), tuple(t.shape))] for name, t in engine.weights.items()}
        boxes["layer.weight"] = halves[world.rank]
        own = make_engine(engine.weights, boxes=boxes)
        return load(path, {"m": own}, world, optimizer=False)

    for error in ranks(2, load_half):
        assert isinstance(error, CheckpointError)
        assert "Rank 1: " in str(error)
        assert "checksum of tensor 'layer.weight' differs" in str(error)


def test_an_engine_that_refuses_on_one_rank_refuses_on_all(
    path: Path, make_engine: Callable[..., Any], ranks: Callable[..., list[Any]], engine: Any
) -> None:
    class Refusing(type(engine)):
        def import_state(self, source: Any, *, optimizer: bool = True) -> None:
            raise CheckpointError("the groups do not match")

    def load_own(world: Any) -> Any:
        kind = Refusing if world.rank == 1 else make_engine
        return load(path, {"m": kind(engine.weights, engine.moments)}, world)

    for error in ranks(2, load_own):
        assert isinstance(error, CheckpointError)
        assert str(error) == f"Rank 1: {path}: the groups do not match"


class _Trap:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


def test_pickles_in_the_directory_are_not_executed(
    path: Path, engine: Any, alone: World, tmp_path: Path
) -> None:
    mark = tmp_path / "sprung"
    trap = pickle.dumps(_Trap(mark))
    for name in (".metadata", "model.pt", "rng/rank-00000.pkl", "m/weights/__0_0.distcp"):
        (path / name).write_bytes(trap)
    load(path, {"m": engine}, alone)
    verify(path)
    for name in (*Files, "rng/rank-00000.json", "manifest.json"):
        (path / name).write_bytes(trap)
    with pytest.raises(CheckpointError):
        load(path, {"m": engine}, alone)
    assert not mark.exists()
    pickle.loads(trap)
    assert mark.exists(), "the trap itself does not work"


def test_a_directory_without_checkpoints_says_what_is_there(
    tmp_path: Path, engine: Any, alone: World
) -> None:
    with pytest.raises(CheckpointError, match=r"It does not exist"):
        load(tmp_path / "no", {"m": engine}, alone)
    (tmp_path / "notes.txt").touch()
    with pytest.raises(CheckpointError, match=r"nor a directory of complete.*It holds: notes.txt"):
        load(tmp_path, {"m": engine}, alone)
