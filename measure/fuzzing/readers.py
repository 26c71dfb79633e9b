"""Readers of files that others have made, each with a valid file to edit and a judge."""

from __future__ import annotations

import copy
import json
import math
import random as python_random
import shutil
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import nn

import unipar
from measure.fuzzing.edits import HOSTILE, edit
from measure.fuzzing.versions import as_version_1, seal, unsealed
from unipar import Session, checkpoint
from unipar.checkpoint import CheckpointImporter, rng
from unipar.checkpoint.boxes import whole
from unipar.checkpoint.decode import open_checkpoint
from unipar.checkpoint.files import digest
from unipar.checkpoint.initial import read_any
from unipar.checkpoint.load import read_generators
from unipar.checkpoint.manifest import Manifest, TensorIndex
from unipar.checkpoint.read import ChunkReader
from unipar.checkpoint.save import save_states
from unipar.data import Loader
from unipar.errors import CheckpointError
from unipar.state import Box, LocalState, TensorState
from unipar.strategy import Engine
from unipar.strategy.registry import strategy_class
from unipar.world import Placement, World

Tensors = dict[str, torch.Tensor]
UNREAD = 77.0
"""In every tensor before it is read, so that what is left out is seen."""


class Reader(ABC):
    """Something valid in a directory, an edit of it, and what reading it gives.

    Args:
        root: an empty directory; beside :attr:`place` it holds files that must not be opened.

    Attributes:
        name: what it is called at the command line.
        what: what is edited, in the docs.
        place: the directory that is read.
    """

    name: str
    what: str

    def __init__(self, root: Path) -> None:
        self.place = root / "inside"
        self.place.mkdir()
        outside = root / "outside"
        outside.mkdir()
        safetensors.torch.save_file({"w": torch.ones(4)}, outside / "rank.safetensors")
        paths = (str(outside / "rank.safetensors"), "../../outside/rank.safetensors")
        self.hostile = (*HOSTILE, *paths)

    @abstractmethod
    def edit(self, random: Random) -> list[str]:
        """Put an edit of the valid file in its place, and say what was done."""

    @abstractmethod
    def read(self, random: Random) -> str:
        """Read it: ``same``, ``told`` or ``silent``.

        Raises:
            CheckpointError: it is refused.
        """

    def close(self) -> None:  # noqa: B027
        """Leave what was joined, if anything was."""


class Model(nn.Module):
    """Tied weights, a buffer, a scalar, and a tensor without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.left, self.right = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.tensor(3))
        self.register_buffer("nothing", torch.empty(0, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.right(self.left(self.embedding(x)))) * self.scale


def divided(states: Any) -> list[TensorState]:
    """Tensors of two dims as two boxes each, which go into two files."""
    found: list[TensorState] = []
    for state in states:
        (tensor,) = state.read()
        if tensor.dim() == 2 and tensor.numel():
            rows, columns = tensor.shape
            low = Box((0, 0), (rows // 2, columns))
            high = Box((rows // 2, 0), (rows - rows // 2, columns))
            parts = (tensor[: rows // 2], tensor[rows // 2 :])
            state = LocalState(state.name, state.shape, state.dtype, (low, high), parts)
        found.append(state)
    return found


class Run(Reader):
    """A checkpoint of a run with all that one can have; edited by its files, or by its manifest."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._session = Session("single", device="cpu")
        self._session.__enter__()
        engine, loader = self._prepare()
        for batch in [next(iter(loader)) for _ in range(2)]:
            engine.train_step(batch, loss)
        state = engine.export_state()
        state.weights, state.optimizer = divided(state.weights), divided(state.optimizer)
        state.extra["scaler"] = torch.amp.GradScaler("cpu").state_dict()
        progress = {"loader": loader.state_dict(), "seed": 3, "global_batch_size": 4}
        manifest = Manifest(
            path=self.place,
            step=2,
            strategy="single",
            world_size=1,
            engines={},
            files={},
            progress=progress,
            metrics={"loss": 1.5, "score": math.nan},
            unipar_version=unipar.__version__,
            torch_version=str(torch.__version__),
        )
        world = World(Placement())
        self.path = save_states(manifest, {"model": state}, world, rng.capture())
        self.write_as()
        self._files = {
            str(file.relative_to(self.path)): file.read_bytes()
            for file in self.path.rglob("*")
            if file.is_file()
        }
        self._changed: set[str] = set()
        self._expected = self._tensors()
        self._said = self._sayings(checkpoint.read_manifest(self.path))

    def close(self) -> None:
        self._session.__exit__(None, None, None)

    def write_as(self) -> None:
        """Make another version of the format of what was saved."""

    def body(self) -> dict[str, Any]:
        """The valid manifest, to be edited."""
        return unsealed(self._files["manifest.json"])

    def put(self, body: dict[str, Any], changed: Mapping[str, bytes] | None = None) -> None:
        """Write the valid files but for ``changed``, and the manifest with its checksum."""
        files = {**(changed or {}), "manifest.json": seal(body)}
        for name in self._changed - files.keys():
            (self.path / name).write_bytes(self._files[name])
        for name, data in files.items():
            (self.path / name).write_bytes(data)
        self._changed = set(files)

    def read(self, random: Random) -> str:
        engine, loader = self._prepare()
        for tensor in engine.module.state_dict().values():
            tensor.fill_(UNREAD)
        if random.random() < 0.3:
            random.choice((checkpoint.describe, checkpoint.newest, checkpoint.verify))(self.path)
        step = self._session.load(self.path, loader=loader)
        assert 0 <= step < 2**53
        tensors = self._tensors()
        if tensors.keys() != self._expected.keys() or any(
            not torch.equal(tensor, self._expected[name]) for name, tensor in tensors.items()
        ):
            return "silent"
        self._load_and_convert(random)
        said = self._sayings(checkpoint.read_manifest(self.path))
        return "same" if said == self._said else "told"

    def _load_and_convert(self, random: Random) -> None:
        if random.random() < 0.1:
            model = checkpoint.load_model(self.path, Model)
            read = model.state_dict()["embedding.weight"]
            assert torch.equal(read, self._expected["embedding.weight"])
            written = self.place / "converted"
            shutil.rmtree(written, ignore_errors=True)
            checkpoint.to_safetensors(self.path, written)

    def _prepare(self) -> tuple[Any, Loader]:
        torch.manual_seed(0)
        self._session.engines.clear()
        engine: Engine = self._session.prepare(
            Model(),
            optimizer=lambda named: torch.optim.AdamW([p for _, p in named], lr=0.01),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3),
        )
        data = torch.arange(12).reshape(12, 1)
        return engine, Loader(data, global_batch_size=4, seed=3)

    def _tensors(self) -> Tensors:
        """What the engine holds now, moments included."""
        state = self._session.engines["model"].export_state()
        held = (*state.weights, *state.optimizer)
        return {one.name: one.read()[0].clone() for one in held}

    def _sayings(self, manifest: Manifest) -> str:
        """All that a manifest says, in an order of its own."""
        told = {**manifest.__dict__, "_tensors": None, "_files": None}
        engine = manifest.engines["model"].__dict__
        return repr([sorted(told.items(), key=str), sorted(engine.items(), key=str)])


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch)[:, 0], batch[:, 0])


class ManifestReader(Run):
    name = "manifest"
    what = "`manifest.json` of a checkpoint"

    def edit(self, random: Random) -> list[str]:
        body = self.body()
        done = edit(body, random, self.hostile)
        self.put(body)
        return done


class HeaderReader(Run):
    name = "header"
    what = "headers of a checkpoint's safetensors files, and the manifest's word of them"

    def edit(self, random: Random) -> list[str]:
        body = self.body()
        number = random.choice(
            [n for n, file in enumerate(body["files"]) if file["path"].endswith("safetensors")]
        )
        file = body["files"][number]
        name: str = file["path"]
        data = self._files[name]
        table = json.loads(data[8 : file["header_bytes"]])
        metadata = table["__metadata__"]
        sharding = json.loads(metadata["DCP_SHARDING_INFO"])
        done = edit(sharding if random.random() < 0.3 else table, random, self.hostile)
        if table.get("__metadata__") is metadata and random.random() < 0.9:
            metadata["DCP_SHARDING_INFO"] = json.dumps(sharding)
        changed = with_header(table, data[file["header_bytes"] :])
        before = file["header_bytes"]
        file["header_bytes"] = 8 + int.from_bytes(changed[:8], "little")
        file["header_digest"] = digest(changed[: file["header_bytes"]])
        file["size"] = len(changed)
        for engine in body["engines"].values():
            for tensor in (*engine["weights"].values(), *engine["optimizer"].values()):
                for chunk in tensor.get("chunks", ()):
                    chunk["start"] += (file["header_bytes"] - before) * (chunk["file"] == number)
        if random.random() < 0.3:
            done += edit(body, random, self.hostile)
        self.put(body, {name: changed})
        return done


class OlderManifestReader(ManifestReader):
    name = "manifest-1"
    what = "`manifest.json` of version 1, which has every position and checksum"

    def write_as(self) -> None:
        as_version_1(self.path)


class OlderHeaderReader(HeaderReader):
    name = "header-1"
    what = "headers of files beside a manifest of version 1"

    def write_as(self) -> None:
        as_version_1(self.path)


class GeneratorsReader(Run):
    name = "generators"
    what = "random generators of a checkpoint"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._state = read_generators(open_checkpoint(self.path), 0)

    def edit(self, random: Random) -> list[str]:
        body = self.body()
        state = json.loads(self._files["rng/rank-00000.json"])
        done = edit(state, random, self.hostile)
        data = json.dumps(state).encode()
        (file,) = [file for file in body["files"] if file["path"].startswith("rng/")]
        file |= {"size": len(data), "header_bytes": len(data), "header_digest": digest(data)}
        self.put(body, {file["path"]: data})
        return done

    def read(self, random: Random) -> str:
        if random.random() < 0.1:
            return super().read(random)
        state = read_generators(open_checkpoint(self.path), 0)
        rng.restore(state)
        # More than a state holds, so that one that leads out of its bounds would be seen.
        torch.rand(700)
        np.random.rand(700)
        for _ in range(700):
            python_random.random()
        return "same" if state == self._state else "told"


def with_header(table: Any, data: bytes) -> bytes:
    text = json.dumps(table).encode()
    return len(text).to_bytes(8, "little") + text + data


def read_all(path: Path) -> Tensors:
    """Every tensor of safetensors, read as a conversion does."""
    manifest = read_any(path)
    found: Tensors = {}
    with ChunkReader(manifest) as reader:
        for name, index in manifest.engines["model"].weights.items():
            found[name] = _filled(reader, name, index)
    return found


def _filled(reader: ChunkReader, name: str, index: TensorIndex) -> torch.Tensor:
    tensor = torch.full(index.shape, 77).to(index.dtype)
    reader.fill(name, index, whole(index.shape), tensor)
    return tensor


def tensors_to_store() -> Tensors:
    torch.manual_seed(1)
    return {
        "a": torch.randn(3, 4),
        "b": torch.randn(3, 4),
        "half": torch.randn(8).bfloat16(),
        "whole": torch.arange(6),
        "flag": torch.tensor([True, False]),
        "scalar": torch.tensor(4.0),
        "nothing": torch.empty(0, 3),
    }


STRICTER = ("is listed twice", "unknown dtype", "not an object")
"""What is refused though the ``safetensors`` package takes it."""


class SafetensorsReader(Reader):
    name = "safetensors"
    what = "a safetensors file, held against the `safetensors` package"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._file = self.place / "model.safetensors"
        safetensors.torch.save_file(tensors_to_store(), self._file, {"format": "pt"})
        self._valid = self._file.read_bytes()

    def edit(self, random: Random) -> list[str]:
        length = int.from_bytes(self._valid[:8], "little")
        text, data = self._valid[8 : 8 + length], self._valid[8 + length :]
        kind = random.random()
        if kind < 0.7:
            table = json.loads(text)
            done = edit(table, random, self.hostile)
            text = json.dumps(table).encode()
            if random.random() < 0.2:
                text, more = _respelled(text, random)
                done.append(more)
        else:
            text, more = _respelled(text, random)
            done = [more]
        length = len(text)
        if random.random() < 0.1:
            length = random.choice((0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1))
            done.append(f"length {length}")
        if random.random() < 0.1:
            data = random.choice((data[:-1], data + b"\0", data * 2, b""))
            done.append("data cut or longer")
        self._file.write_bytes(length.to_bytes(8, "little") + text + data)
        return done

    def read(self, random: Random) -> str:
        theirs = self._theirs()
        try:
            ours = read_all(self._file)
        except CheckpointError as error:
            agreed = theirs is None or any(reason in str(error) for reason in STRICTER)
            if not agreed:
                raise AssertionError(f"refused, and not by safetensors: {error}") from error
            raise
        if theirs is None or theirs.keys() != ours.keys():
            return "silent"
        equal = all(
            theirs[name].dtype == tensor.dtype
            and theirs[name].shape == tensor.shape
            and as_bytes(theirs[name]) == as_bytes(tensor)
            for name, tensor in ours.items()
        )
        return "same" if equal else "silent"

    def _theirs(self) -> Tensors | None:
        try:
            return safetensors.torch.load(self._file.read_bytes())
        except (safetensors.SafetensorError, KeyError):
            return None


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _respelled(text: bytes, random: Random) -> tuple[bytes, str]:
    """JSON as few write it."""
    old, new = random.choice(
        (
            (b"{", b' {"x": NaN,'), (b"[0,", b"[-0,"), (b"[0,", b"[0.0,"), (b"[0,", b"[0e0,"),
            (b"}", b"}\0"), (b"{", b"\xef\xbb\xbf{"), (b'"a"', b'"\\u0061"'),
            (b'"a"', b'"\\ud800"'),
            (b'"a"', b'"b"'), (b'"a"', b'"a\n"'), (b'"dtype"', b'"dtype":"F32","dtype"'),
            (b'"dtype"', b'"more":[1e999],"dtype"'), (b'"dtype"', b'"more":{"x":[1]},"dtype"'),
            (b"{", b'{"__metadata__":{},'), (b"{", b'{"__metadata__":null,'), (b":", b" :\t\n"),
            (b"[0,", b"[00,"), (b"[0,", b"[+0,"), (b"F32", b"F4"), (b"F32", b"f32"),
        )
    )  # fmt: skip
    return text.replace(old, new, random.choice((1, 1, -1))), f"{old!r} as {new!r}"


class IndexReader(Reader):
    name = "index"
    what = "`model.safetensors.index.json` of Hugging Face"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._expected = tensors_to_store()
        names = list(self._expected)
        weight_map = {}
        for number in range(3):
            file = f"model-{number + 1:05d}-of-00003.safetensors"
            part = {name: self._expected[name] for name in names[number::3]}
            safetensors.torch.save_file(part, self.place / file)
            weight_map |= dict.fromkeys(part, file)
        self._index = {"metadata": {"total_size": 1}, "weight_map": weight_map}

    def edit(self, random: Random) -> list[str]:
        index = json.loads(json.dumps(self._index))
        done = edit(index, random, self.hostile)
        (self.place / "model.safetensors.index.json").write_text(json.dumps(index))
        return done

    def read(self, random: Random) -> str:
        found = read_all(self.place)
        equal = found.keys() == self._expected.keys() and all(
            as_bytes(found[name]) == as_bytes(tensor) for name, tensor in self._expected.items()
        )
        return "same" if equal else "silent"


class DeepSpeedReader(Reader):
    """What two ranks have saved at stages 1 and 3, in miniature.

    These files have no checksums, and nothing in them tells of a tensor twice: another value in one
    is the writer's word.
    """

    name = "deepspeed"
    what = "files of DeepSpeed's own, stages 1 and 3, and `latest`"

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        shutil.copytree(self.place, root / "outside" / "global_step10")
        strategy = strategy_class("deepspeed")
        assert issubclass(strategy, CheckpointImporter)
        self._strategy = strategy
        torch.manual_seed(2)
        self._steps = {"stage1": self._stage_1(), "stage3": self._stage_3()}
        tensors = (torch.ones(1).expand(10**10), torch.empty(0), torch.ones(2, 2), torch.arange(9))
        self._hostile = (*self.hostile, *tensors, torch.ones(9).to_sparse(), torch.tensor(math.nan))
        for step, files in self._steps.items():
            (self.place / step).mkdir()
            for name, contents in files.items():
                torch.save(contents, self.place / step / name)
        (self.place / "latest").write_text("stage1")
        self._changed: Path | None = None
        self._expected = {step: self._read(self.place / step) for step in self._steps}

    def edit(self, random: Random) -> list[str]:
        self.restore()
        if random.random() < 0.05:
            self._changed = self.place / "latest"
            self._changed.write_bytes(random.choice(self.hostile_names()))
            return [f"latest: {self._changed.read_bytes()[:60]!r}"]
        step = random.choice(list(self._steps))
        name = random.choice(list(self._steps[step]))
        contents = copy.deepcopy(self._steps[step][name])
        done = edit(contents, random, self._hostile)
        self._changed = self.place / step / name
        torch.save(contents, self._changed)
        if random.random() < 0.2:
            data = bytearray(self._changed.read_bytes())
            for _ in range(random.choice((1, 1, 20))):
                data[random.randrange(len(data))] = random.randrange(256)
            self._changed.write_bytes(data)
            done.append("bytes changed")
        return [f"{step}/{name}: {'; '.join(done)}"]

    def hostile_names(self) -> list[bytes]:
        outside = self.place.parent / "outside" / "global_step10"
        names = [b"../outside/global_step10", str(outside).encode(), b"", b"..", b"a\0b", b"\xff"]
        return [*names, b"x" * 5000, b"stage3", b"."]

    def read(self, random: Random) -> str:
        if self._changed is None or self._changed.name == "latest":
            self._read(self.place)
            return "same" if self._changed is None else "told"
        found = self._read(self._changed.parent)
        expected = self._expected[self._changed.parent.name]
        equal = found.keys() == expected.keys() and all(
            torch.equal(found[name], tensor) for name, tensor in expected.items()
        )
        return "same" if equal else "told"

    def _read(self, path: Path) -> Tensors:
        state = self._strategy.read_checkpoint(path)
        return {one.name: one.read()[0] for one in (*state.weights, *state.optimizer)}

    def restore(self) -> None:
        """Take the last edit back."""
        if self._changed is not None and self._changed.name == "latest":
            self._changed.write_text("stage1")
        elif self._changed is not None:
            step, name = self._changed.parent.name, self._changed.name
            torch.save(self._steps[step][name], self._changed)
        self._changed = None

    def _model(self, module: Tensors) -> dict[str, Any]:
        return {
            "module": {**module, "mean": torch.ones(3), "tied": module["w"]},
            "global_steps": 10,
            "param_shapes": [OrderedDict(w=[3, 4], b=[5]), OrderedDict(v=[2, 2])],
            "shared_params": {"tied": "w"},
            "buffer_names": ["mean"],
            "lr_scheduler": {"last_epoch": 10, "base_lrs": [0.1, 0.1]},
            "ds_config": {"zero_optimization": {"stage": 1}},
        }

    def _base(self, sizes: list[int]) -> dict[str, Any]:
        return {
            "state": {
                flat: {"exp_avg": torch.randn(size), "exp_avg_sq": torch.rand(size), "step": 10}
                for flat, size in enumerate(sizes)
            },
            "param_groups": [{"lr": 0.1, "betas": [0.9, 0.99], "params": [k]} for k in range(2)],
        }

    def _stage_1(self) -> dict[str, Any]:
        module = {"w": torch.randn(3, 4), "b": torch.randn(5), "v": torch.randn(2, 2)}
        flats = [torch.randn(18), torch.randn(4)]
        files: dict[str, Any] = {"mp_rank_00_model_states.pt": self._model(module)}
        for rank, cuts in enumerate(((slice(9), slice(2)), (slice(9, 17), slice(2, 4)))):
            own = [flat[cut].clone() for flat, cut in zip(flats, cuts, strict=True)]
            files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {
                "optimizer_state_dict": {
                    "single_partition_of_fp32_groups": own,
                    "base_optimizer_state": self._base([9, 2]),
                    "partition_count": [2, 2],
                    "param_alignment_paddings": [[0, 0], [0]],
                }
            }
        return files

    def _stage_3(self) -> dict[str, Any]:
        files: dict[str, Any] = {}
        module = {name: torch.empty(0) for name in ("w", "b", "v")}
        for rank in range(2):
            files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = self._model(module)
            files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {
                "optimizer_state_dict": {
                    "fp32_flat_groups": [torch.randn(9), torch.randn(2)],
                    "optimizer_state_dict": self._base([9, 2]),
                    "partition_count": 2,
                }
            }
        return files


KINDS = (
    ManifestReader,
    OlderManifestReader,
    HeaderReader,
    OlderHeaderReader,
    GeneratorsReader,
    SafetensorsReader,
    IndexReader,
    DeepSpeedReader,
)
READERS: dict[str, Callable[[Path], Reader]] = {kind.name: kind for kind in KINDS}
