"""What is well-formed and yet wrong, as a hostile or another writer makes it: each is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from unipar.checkpoint import (
    checkpoints,
    describe,
    from_safetensors,
    load,
    load_model,
    newest,
    save,
    to_safetensors,
    verify,
)
from unipar.checkpoint.boxes import check_cover
from unipar.checkpoint.files import digest
from unipar.data import Loader
from unipar.errors import CheckpointError
from unipar.state import Box
from unipar.world import World

SHARD = "m/weights/rank-00000.safetensors"
PROGRESS = {
    "seed": 1,
    "global_batch_size": 4,
    "loader": {"epoch": 0, "index": 2, "stream": None, "num_samples": 12, "global_batch_size": 4},
    "a key of later versions": [1],
}


@pytest.fixture
def engine(make_engine: Callable[..., Any]) -> Any:
    halves = [Box((0, 0), (2, 3)), Box((2, 0), (2, 3))]
    whole = {"bias": [Box((0,), (3,))], "empty": [Box((0,), (0,))], "w.step": [Box((), ())]}
    return make_engine(
        {"w": torch.randn(4, 3), "bias": torch.ones(3), "empty": torch.empty(0)},
        {"w.exp_avg": torch.randn(4, 3), "w.step": torch.tensor(3.0)},
        boxes={"w": halves, "w.exp_avg": halves, **whole},
        extra={"num_steps": 7},
        aliases={"tied": "w"},
    )


@pytest.fixture
def path(tmp_path: Path, engine: Any, alone: World) -> Path:
    metrics = {"loss": float("nan"), "score": float("inf")}
    return save(tmp_path / "run", {"m": engine}, alone, step=7, progress=PROGRESS, metrics=metrics)


@pytest.fixture
def old(path: Path, make_old: Callable[[Path], None]) -> Path:
    """The same, with a manifest of version 1."""
    make_old(path)
    return path


def put(at: str, value: Any) -> Callable[[Any], None]:
    """An edit that puts ``value`` where ``at`` says, its last part being a key or an index."""

    def change(body: Any) -> None:
        *holders, last = [int(k) if k.isdigit() else k for k in at.split("/")]
        for key in holders:
            body = body[key]
        if value is DELETED:
            del body[last]
        else:
            body[last] = value(body[last]) if callable(value) else value

    return change


DELETED = object()
W = "engines/m/weights/w"
OF_BOTH = [
    ("step", -5, "step: -5"),
    ("step", float("nan"), "step: nan"),
    ("step", 1e30, "step: 1e[+]30"),
    ("step", 10**20, "step"),
    ("step", 8, "step is 8, and the directory is named step-00000007"),
    ("world_size", 0, "world_size"),
    ("world_size", 2, "files has rng/rank-00000.json for a world_size of 2"),
    ("weights_only", True, "weights_only is true, and there is training state"),
    ("metrics/loss", "low", "metrics.loss: 'low'"),
    ("progress/loader", DELETED, "progress.loader is missing"),
    ("progress/seed", DELETED, "progress.seed is missing"),
    ("progress/loader/index", -1, "progress.loader.index: -1"),
    ("progress/loader/epoch", 0.5, "progress.loader.epoch: 0.5"),
    ("progress/loader/global_batch_size", 2, "global_batch_size is 4, and that of .*loader 2"),
    ("files/0/path", "../../outside", "files.0.path: '../../outside'"),
    ("files/0/path", "/etc/passwd", "files.0.path"),
    ("files/0/path", "a/../b", "files.0.path"),
    ("files/0/path", "a\0b", "files.0.path"),
    ("files/0/path", "manifest.json", "files.0.path"),
    ("files/0/size", 10**10, r"files gives .* 10000000000 bytes"),
    ("files/0/header_bytes", 10**10, "files.0.header_bytes"),
    ("files", lambda files: [*files, files[0]], "files lists .* twice"),
    (f"{W}/dtype", "F16", "xxh3|start of tensor|end.? at"),
    (f"{W}/dtype", "F99", "engines.m.weights.w.dtype: 'F99'"),
    (f"{W}/shape", [4, -3], "engines.m.weights.w.shape.1: -3"),
    (f"{W}/shape", [2**62, 2**62], "engines.m.weights.w: its shape .* is too large"),
    (f"{W}/shape", [10**10, 3], "Tensor 'w' .*hold 12 of its 30000000000 elements"),
    ("engines/m/weights/w", DELETED, "'w'|start of|end.? at"),
    ("engines/m/aliases/tied", "nothing", "aliases has 'tied' for 'nothing'"),
    ("engines/m/groups/0/params", ["w", "w"], "groups has 'w' more than once"),
    ("engines/m/extra/num_steps", -1, "extra.num_steps: -1"),
    ("engines", 3, "engines: 3"),
    ("surprise", 3, "surprise: 3"),
]
OF_VERSION_1 = [
    ("files/0/header_bytes", lambda n: n - 8, "start of tensor"),
    (f"{W}/chunks", DELETED, "engines.m.weights.w.chunks: Field required"),
    (f"{W}/chunks/0", DELETED, "Tensor 'w' .*hold 6 of its 12 elements"),
    (f"{W}/chunks/0/offsets", [1, 0], "Tensor 'w' .*overlap"),
    (f"{W}/chunks/0/sizes", [-2, 3], "chunks.0.sizes.0: -2"),
    (f"{W}/chunks/0/offsets", [3, 0], "Tensor 'w' .*has no part"),
    (f"{W}/chunks/0/start", lambda at: at + 4, "start of tensor 'w'"),
    (f"{W}/chunks/0/file", 99, "weights.w.chunks.0.file is 99"),
    (f"{W}/chunks/0/xxh3", [], "weights.w.chunks.0.xxh3 has 0 checksums"),
    ("version", 2, "engines.m.weights.w.files: Field required"),
]
OF_VERSION_2 = [
    ("files/0/header_bytes", lambda n: n - 8, "files gives .* its tensors end at"),
    ("files/0/header_bytes", lambda n: n + 8, "files gives .* its tensors end at"),
    (f"{W}/files", DELETED, "engines.m.weights.w.files: Field required"),
    (f"{W}/files", [], "weights.w.files has 0 parts"),
    (f"{W}/files", [0, 1], "weights.w.files"),
    (f"{W}/files", [0, 1, 2**60], "weights.w.files has 11529215046068469.* parts, and the headers"),
    (f"{W}/files", [0, 1, 1, 1, 0, 1], r"weights.w.files: \[0, 1, 1\] is no run"),
    (f"{W}/files", [0, 1, -2], "weights.w.files has -2 parts"),
    (f"{W}/files", [0, 0, 2], "weights.w.files has a file more than once"),
    (f"{W}/files", [0, 99, 2], "weights.w.files has 99, and there are 5 files"),
    (f"{W}/files", [1, -2, 2], r"weights.w.files: \[1, -2, 2\] leads out"),
    (f"{W}/files", [0, 2**64, 2], "weights.w.files.1: 18446744073709551616"),
    (f"{W}/files", [0, "1", 2], "weights.w.files.1: '1'"),
    (f"{W}/files", [0, 4, 2], "Tensor|files gives .* its tensors end at"),
    (f"{W}/offsets", [[0, 2, 2]], "weights.w.offsets has 1 columns, and the tensor 2 dims"),
    (f"{W}/offsets/0", [0, 2, 1], r"weights.w.offsets.0: \[0, 2, 1\] is no run"),
    (f"{W}/offsets/0", [0, 0, 1], "weights.w.offsets.0: it has 1 values, and there are 2 parts"),
    (f"{W}/offsets/0", [0, 1, 2], "Tensor 'w' .*overlap"),
    (f"{W}/offsets/0", [0, 3, 2], "Tensor 'w' .*has no part"),
    (f"{W}/offsets/0", [2**62, 2**61, 2], "Tensor 'w' .*has no part"),
    (f"{W}/offsets/0", [-1, 2, 2], "leads out"),
    (f"{W}/sizes/0", [2, -1, 2], "Tensor 'w' .*hold 9 of its 12 elements"),
    (f"{W}/sizes/0", [4, -4, 2], "Tensor 'w' |weights.w.sizes has a part of no elements"),
    (f"{W}/sizes/1", [3, 0, 2**40], "weights.w.sizes.1: .* leads out"),
    ("version", 1, "engines.m.weights.w.chunks: Field required"),
]
NAMED = [
    *((version, *edit) for edit in OF_BOTH for version in (1, 2)),
    *((1, *edit) for edit in OF_VERSION_1),
    *((2, *edit) for edit in OF_VERSION_2),
]


@pytest.mark.parametrize(
    ("version", "at", "value", "named"), NAMED, ids=[f"{v}-{a}-{n}" for v, a, _, n in NAMED]
)
def test_a_sealed_edit_is_refused_by_field_wherever_a_checkpoint_is_read(
    path: Path,
    engine: Any,
    alone: World,
    tmp_path: Path,
    make_old: Callable[[Path], None],
    seal: Callable[..., None],
    version: int,
    at: str,
    value: Any,
    named: str,
) -> None:
    if version == 1:
        make_old(path)
    seal(path, put(at, value))
    readers: list[Callable[[], Any]] = [
        lambda: load(path, {"m": engine}, alone),
        lambda: load_model(path, torch.nn.Linear(3, 4)),
        lambda: to_safetensors(path, tmp_path / "out"),
        lambda: describe(path),
        lambda: verify(path),
    ]
    for read in readers:
        with pytest.raises(CheckpointError, match=rf"(?s)manifest\.json.*({named})"):
            read()
    assert newest(path.parent) is None
    assert checkpoints(path.parent) == []


@pytest.mark.parametrize("made", ["path", "old"])
def test_what_is_valid_is_read(
    made: str, request: pytest.FixtureRequest, engine: Any, alone: World, seal: Callable[..., None]
) -> None:
    path = request.getfixturevalue(made)
    seal(path, lambda body: None)
    before = {name: tensor.clone() for name, tensor in engine.weights.items()}
    for tensor in engine.weights.values():
        tensor.zero_()
    manifest = load(path, {"m": engine}, alone)
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.weights.items())
    assert manifest.progress == PROGRESS
    assert verify(path).metrics["score"] == float("inf")


def swap(first: str, second: str) -> Callable[[Any], None]:
    def change(body: Any) -> None:
        part = body["engines"]["m"]
        a, b = (key.split("/") for key in (first, second))
        part[a[0]][a[1]], part[b[0]][b[1]] = part[b[0]][b[1]], part[a[0]][a[1]]

    return change


def swap_offsets(body: Any) -> None:
    low, high = body["engines"]["m"]["weights"]["w"]["chunks"]
    low["offsets"], high["offsets"] = high["offsets"], low["offsets"]


def reorder(body: Any) -> None:
    """Of version 2 the order of the tensors says where they are."""
    engine = body["engines"]["m"]
    engine["weights"] = dict(reversed(engine["weights"].items()))


def twice(body: Any) -> None:
    """A tensor without elements takes no room, so that it could lie where another does."""
    engine = body["engines"]["m"]
    engine["optimizer"]["empty"] = engine["weights"]["empty"]


DIFFERENT_DTYPE = (
    put(f"{W}/dtype", "I32"),
    "differ on tensor 'w': dtype torch.float32 and torch.int32",
)
DIFFERENT = [
    (1, *DIFFERENT_DTYPE),
    (2, *DIFFERENT_DTYPE),
    (1, swap_offsets, "differ on tensor 'w': offsets"),
    (2, put(f"{W}/offsets/0", [2, -2, 2]), "differ on tensor 'w': offsets"),
    (2, put(f"{W}/files", lambda runs: [1, -1, 2]), "differ on tensor 'w': offsets"),
    (2, reorder, "differ on tensor '.*': start"),
    (1, swap("weights/w", "optimizer/w.exp_avg"), "holds no tensor 'w'"),
    (2, swap("weights/w", "optimizer/w.exp_avg"), "holds no tensor 'w'|are no checksums"),
    (1, twice, "holds no tensor 'empty'"),
    (2, twice, "holds no tensor 'empty'"),
]


@pytest.mark.parametrize(("version", "change", "named"), DIFFERENT)
def test_what_the_manifest_and_the_files_tell_apart_is_refused(
    path: Path,
    engine: Any,
    alone: World,
    make_old: Callable[[Path], None],
    seal: Callable[..., None],
    version: int,
    change: Callable[[Any], None],
    named: str,
) -> None:
    if version == 1:
        make_old(path)
    seal(path, change)
    for read in (lambda: load(path, {"m": engine}, alone), lambda: verify(path)):
        with pytest.raises(CheckpointError, match=named):
            read()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["manifest.json", SHARD, "rng/rank-00000.json"])
@pytest.mark.parametrize("kind", ["FIFO", "device", "directory", "link"])
def test_what_is_no_file_of_the_checkpoint_is_not_opened(
    path: Path, engine: Any, alone: World, tmp_path: Path, name: str, kind: str
) -> None:
    file = path / name
    outside = tmp_path / "outside"
    shutil.copy(file, outside)
    file.unlink()
    if kind == "FIFO":
        os.mkfifo(file)
    elif kind == "directory":
        file.mkdir()
    else:
        file.symlink_to("/dev/zero" if kind == "device" else outside)
    told = kind if kind in ("FIFO", "directory") else "link that leads out of"
    for read in (lambda: load(path, {"m": engine}, alone), lambda: verify(path)):
        with pytest.raises(CheckpointError, match=rf"{name} is a {told}"):
            read()
    assert newest(path.parent) is None


def test_a_checkpoint_may_lie_behind_a_link_and_hold_links_within(
    path: Path, engine: Any, alone: World, tmp_path: Path
) -> None:
    (path / SHARD).rename(path / "kept")
    (path / SHARD).symlink_to("../../kept")
    (tmp_path / "elsewhere").symlink_to(path.parent)
    load(tmp_path / "elsewhere", {"m": engine}, alone)


def edit_generators(path: Path, change: Callable[[Any], Any], seal: Callable[..., None]) -> None:
    file = path / "rng/rank-00000.json"
    state = json.loads(file.read_bytes())
    change(state)
    file.write_bytes(json.dumps(state).encode())

    def reseal(body: Any) -> None:
        (own,) = [own for own in body["files"] if own["path"].startswith("rng")]
        size = file.stat().st_size
        own |= {"size": size, "header_bytes": size, "header_digest": digest(file.read_bytes())}

    seal(path, reseal)


@pytest.mark.parametrize(
    ("at", "value"),
    [
        ("torch", "00"),
        ("torch", lambda text: text[:-2]),
        ("torch", "zz"),
        ("python/1", [1, 2]),
        ("python/1/624", 625),
        ("numpy/state/pos", 10**6),
        ("numpy/state/key", "00"),
        ("numpy/bit_generator", "PCG64"),
        ("cuda", 5),
    ],
)
def test_no_state_of_a_generator_is_refused_before_any_changes(
    path: Path, engine: Any, alone: World, seal: Callable[..., None], at: str, value: Any
) -> None:
    edit_generators(path, put(at, value), seal)
    before = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=r"rng/rank-00000\.json is damaged"):
        load(path, {"m": engine}, alone)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(CheckpointError, match=r"rng/rank-00000\.json is damaged"):
        verify(path)


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({"index": 0}, "no 'epoch'"),
        ({"epoch": 0, "index": -5}, "index=-5"),
        ({"epoch": float("nan"), "index": 0}, "epoch=nan"),
        ({"epoch": 0, "index": 1e30}, r"index=1e\+30"),
        ({"epoch": 0, "index": True}, "index=True"),
        ({"epoch": 0, "index": 4}, "batch 4 of an epoch of 3"),
    ],
)
def test_a_place_in_the_data_that_cannot_be_is_refused(state: Any, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        Loader(list(range(12)), global_batch_size=4).load_state_dict(state)


# -- safetensors, and Hugging Face's index ---------------------------------------------------------


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


def entry(start: int, end: int, shape: Any = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("head", "named"),
    [
        (header(a=entry(-8, 0), b=entry(0, 8)), "'a': data_offsets"),
        (header(a=entry(0, 8), b=entry(4, 12)), "'b' begin at 4"),
        (header(a=entry(8, 16)), "'a' begin at 8"),
        (header(a=entry(0, 8)), "its tensors end at"),
        (header(a=entry(0, 16)), "'a' should take 8 bytes"),
        (header(a=entry(0, 16, [-2, -2])), "'a': shape"),
        (header(a=entry(0, 16, [4.0])), "'a': shape"),
        (header(a=entry(0, 16, [0, 2**62, 4])), "'a': its shape"),
        (header(a=entry(0, 16, [4], "F99")), "'a' has unknown dtype F99"),
        (header(a={"dtype": "F32"}), "'a' has no shape"),
        (header(a=3), "'a' is described by a int"),
        (header(__metadata__={"a": 3}, a=entry(0, 16, [4])), "__metadata__"),
        (header(__metadata__={"a": "\ud800"}, a=entry(0, 16, [4])), "__metadata__"),
        (b"\2\0\0\0\0\0\0\0[]", "no JSON object"),
        (b"\4\0\0\0\0\0\0\0{}\0\0", "damaged safetensors header"),
        ((2**62).to_bytes(8, "little") + b"{}", "no safetensors file, or is cut short"),
    ],
)
def test_a_header_that_does_not_account_for_every_byte_is_refused(
    tmp_path: Path, head: bytes, named: str
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(head + bytes(16))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{named}"):
        from_safetensors(file, tmp_path / "new")
    with pytest.raises(safetensors.SafetensorError):
        safetensors.torch.load(file.read_bytes())


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Hugging Face's layout, with files that are links, as in its cache."""
    directory, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    directory.mkdir()
    blobs.mkdir()
    weight_map = {}
    for number in (1, 2):
        name = f"model-{number:05d}-of-00002.safetensors"
        safetensors.torch.save_file({f"w{number}": torch.ones(number)}, blobs / str(number))
        (directory / name).symlink_to(blobs / str(number))
        weight_map[f"w{number}"] = name
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def test_hugging_faces_cache_is_read(shards: Path) -> None:
    assert list(describe(shards).engines["model"].weights) == ["w1", "w2"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("weight_map", "named"),
    [
        ({"w1": "../blobs/1"}, "'w1' in '../blobs/1', which is no relative path"),
        ({"w1": "/dev/zero"}, "'w1' in '/dev/zero'"),
        ({"w1": "model-00001-of-00002.safetensors"}, "lacks model-00002-of-00002.safetensors"),
        ({"w1": "nothing.safetensors"}, "nothing.safetensors"),
        ({"w1": 3}, "weight_map.w1"),
        ({}, "weight_map is empty"),
        ([], "weight_map"),
    ],
)
def test_an_index_leads_nowhere_else(shards: Path, weight_map: Any, named: str) -> None:
    index = shards / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=named):
        describe(shards)


def test_an_index_that_says_another_file_is_refused(shards: Path) -> None:
    index = shards / "model.safetensors.index.json"
    known = json.loads(index.read_text())["weight_map"]
    swapped = dict(zip(known, reversed(known.values()), strict=True))
    index.write_text(json.dumps({"weight_map": swapped}))
    with pytest.raises(CheckpointError, match=r"index.json: weight_map has tensor 'w1' in .*00002"):
        describe(shards)


@pytest.mark.timeout(60)
def test_a_device_for_a_shard_is_not_read(shards: Path) -> None:
    name = "model-00002-of-00002.safetensors"
    (shards / name).unlink()
    (shards / name).symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match=rf"{name} is a device"):
        describe(shards)


# -- covering --------------------------------------------------------------------------------------


def pinwheel(size: int) -> list[Box]:
    """Four bricks around a hole's place, which no straight cut divides, and the middle."""
    k = size // 3
    return [
        Box((0, 0), (k, 2 * k)),
        Box((0, 2 * k), (2 * k, k)),
        Box((2 * k, k), (k, 2 * k)),
        Box((k, 0), (2 * k, k)),
        Box((k, k), (k, k)),
    ]


def test_any_division_is_held_to_be_whole() -> None:
    boxes = pinwheel(9)
    check_cover("w", (9, 9), boxes)
    moved = [*boxes[:-1], Box((4, 3), (3, 3))]
    with pytest.raises(CheckpointError, match=r"parts .* and .* overlap"):
        check_cover("w", (9, 9), moved)
    columns = [Box((0, k), (8, 1)) for k in range(20_000)]
    check_cover("w", (8, 20_000), columns)
    with pytest.raises(CheckpointError, match="overlap"):
        check_cover("w", (8, 20_000), [*columns[:-1], columns[7]])
