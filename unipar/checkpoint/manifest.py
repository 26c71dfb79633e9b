"""The manifest: what a checkpoint holds, where it lies, and the checksums of all of it.

A checkpoint is a directory. ``manifest.json`` is written last, so a directory with a valid manifest
is complete. All state is in safetensors files and JSON; nothing is ever unpickled.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from unipar.checkpoint.files import digest
from unipar.checkpoint.safetensors import NAMES
from unipar.errors import CheckpointError
from unipar.state import Box, GroupState

FORMAT = "unipar-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 1 << 30
"""The longest manifest: a checkpoint of 10 TB takes a fifth of it for checksums."""


class FileInfo(NamedTuple):
    """A file of the checkpoint: its bytes, and the length and digest of what precedes the data."""

    size: int
    header_bytes: int
    header_digest: str


class Chunk(NamedTuple):
    """A stored part of a tensor.

    Attributes:
        box: which part.
        file: the file's path, relative to the checkpoint.
        start: where its bytes begin in the file; they are contiguous, in row-major order.
        digests: the xxh3 of each piece of them.
    """

    box: Box
    file: str
    start: int
    digests: tuple[str, ...] | None


@dataclass(frozen=True)
class TensorIndex:
    """A stored tensor: its full shape, its dtype and its parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class EngineIndex:
    """The stored state of one engine; see :class:`unipar.state.EngineState`."""

    weights: Mapping[str, TensorIndex]
    optimizer: Mapping[str, TensorIndex] = field(default_factory=dict)
    groups: tuple[GroupState, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's contents.

    Attributes:
        path: the checkpoint's directory.
        step: training steps taken.
        strategy: the strategy that wrote it.
        world_size: how many ranks wrote it.
        engines: by name.
        files: by path, relative to the checkpoint.
        progress: the loop's position (data, epoch, seed, …), JSON values.
        metrics: metrics at this step.
        weights_only: whether it holds no training state (made from a model by conversion).
        unipar_version: the version of unipar that wrote it.
        torch_version: the version of PyTorch that wrote it.
    """

    path: Path
    step: int
    strategy: str
    world_size: int
    engines: Mapping[str, EngineIndex]
    files: Mapping[str, FileInfo]
    progress: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    weights_only: bool = False
    unipar_version: str = ""
    torch_version: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes on disk, apart from the manifest."""
        return sum(file.size for file in self.files.values())

    def chunks_of(self, file: str) -> Sequence[tuple[str, TensorIndex, Chunk]]:
        """Return the parts stored in a file, each with its tensor and that tensor's name."""
        return self._by_file.get(file, ())

    @functools.cached_property
    def _by_file(self) -> Mapping[str, list[tuple[str, TensorIndex, Chunk]]]:
        found: dict[str, list[tuple[str, TensorIndex, Chunk]]] = {}
        for engine in self.engines.values():
            for name, index in (*engine.weights.items(), *engine.optimizer.items()):
                for chunk in index.chunks:
                    found.setdefault(chunk.file, []).append((name, index, chunk))
        return found


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON; its first line holds the checksum of all that follows.

    Raises:
        CheckpointError: a value in it is no JSON value.
    """
    names = list(manifest.files)
    numbers = {name: number for number, name in enumerate(names)}
    body = {
        "format": FORMAT,
        "version": VERSION,
        "unipar": manifest.unipar_version,
        "torch": manifest.torch_version,
        "strategy": manifest.strategy,
        "world_size": manifest.world_size,
        "step": manifest.step,
        "weights_only": manifest.weights_only,
        "progress": dict(manifest.progress),
        "metrics": dict(manifest.metrics),
        "files": [{"path": name, **manifest.files[name]._asdict()} for name in names],
        "engines": {
            name: {
                "groups": [
                    {"params": list(group.params), "hyperparameters": dict(group.hyperparameters)}
                    for group in engine.groups
                ],
                "extra": dict(engine.extra),
                "aliases": dict(engine.aliases),
                "weights": _encode_tensors(engine.weights, numbers),
                "optimizer": _encode_tensors(engine.optimizer, numbers),
            }
            for name, engine in manifest.engines.items()
        },
    }
    for key, value in _loose_values(body):
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"Cannot save {key}: {error}. A checkpoint takes only JSON values there."
            ) from error
    rest = json.dumps(body, separators=(",", ":"))[1:].encode() + b"\n"
    if len(rest) > MAX_MANIFEST_BYTES - 64:
        raise CheckpointError(
            f"The manifest would take {len(rest)} bytes; no more than {MAX_MANIFEST_BYTES} are "
            "read. Divide the tensors into fewer parts."
        )
    return f'{{"checksum":"{digest(rest)}",\n'.encode() + rest


def _loose_values(body: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The values that come from outside, by the name that an error gives them."""
    values = [("progress", body["progress"]), ("metrics", body["metrics"])]
    for name, engine in body["engines"].items():
        values += [(f"'{key}' of engine '{name}'", value) for key, value in engine["extra"].items()]
        for index, group in enumerate(engine["groups"]):
            values += [
                (f"'{key}' of parameter group {index} of engine '{name}'", value)
                for key, value in group["hyperparameters"].items()
            ]
    return values


def _encode_tensors(
    tensors: Mapping[str, TensorIndex], numbers: Mapping[str, int]
) -> dict[str, Any]:
    return {
        name: {
            "shape": tensor.shape,
            "dtype": NAMES[tensor.dtype],
            "chunks": [
                {
                    "file": numbers[chunk.file],
                    "start": chunk.start,
                    "offsets": chunk.box.offsets,
                    "sizes": chunk.box.sizes,
                    "xxh3": chunk.digests,
                }
                for chunk in tensor.chunks
            ],
        }
        for name, tensor in tensors.items()
    }
