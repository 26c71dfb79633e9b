"""The manifest: what a checkpoint holds, and in which files.

A checkpoint is a directory. ``manifest.json`` is written last, so a directory with a valid manifest
is complete. All state is in safetensors files and JSON; nothing is ever unpickled.

The checksums of the data stand in the header of each file, and those of the headers here. So what
rank 0 gathers and writes grows with the number of files, and not with that of their tensors.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from unipar.checkpoint.division import Chunk, Division
from unipar.checkpoint.files import digest
from unipar.checkpoint.runs import values
from unipar.checkpoint.safetensors import NAMES
from unipar.errors import CheckpointError
from unipar.state import GroupState
from unipar.utils.listing import MANIFEST as MANIFEST
from unipar.utils.listing import MAX_MANIFEST_BYTES as MAX_MANIFEST_BYTES

FORMAT = "unipar-checkpoint"
VERSION = 2
"""Of version 1, which is read too, the manifest has every checksum and position."""


class FileInfo(NamedTuple):
    """A file of the checkpoint: its bytes, and the length and digest of what precedes the data."""

    size: int
    header_bytes: int
    header_digest: str


@dataclass(frozen=True)
class TensorIndex:
    """A stored tensor: its full shape, its dtype and its parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: Sequence[Chunk]


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

    @property
    def tensors(self) -> Iterator[tuple[str, TensorIndex]]:
        """All tensors, of all engines, in the order in which they stand here."""
        for engine in self.engines.values():
            yield from engine.weights.items()
            yield from engine.optimizer.items()

    def chunks_of(self, file: str) -> list[tuple[str, TensorIndex, Chunk]]:
        """Return the parts stored in a file, each with its tensor and that tensor's name."""
        files = self._files
        if file not in files.numbers:
            return []
        number = files.numbers[file]
        found = slice(*np.searchsorted(files.of, (number, number + 1)).tolist())
        return [
            (*self._tensors[tensor], self._tensors[tensor][1].chunks[place])
            for tensor, place in zip(
                files.tensors[found].tolist(), files.places[found].tolist(), strict=True
            )
        ]

    @functools.cached_property
    def _tensors(self) -> list[tuple[str, TensorIndex]]:
        return list(self.tensors)

    @functools.cached_property
    def _files(self) -> _Files:
        """The parts by file."""
        numbers = {name: number for number, name in enumerate(self.files)}
        of: list[Any] = [np.empty(0, np.int32)]
        for _, index in self._tensors:
            own = (
                values(index.chunks.files)
                if isinstance(index.chunks, Division)
                else [numbers[chunk.file] for chunk in index.chunks]
            )
            of.append(np.array(own, np.int32))
        lengths = [len(own) for own in of[1:]]
        tensors = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        places = np.concatenate([np.empty(0, np.int32), *map(_counted, lengths)])
        found = np.concatenate(of)
        order = np.argsort(found, kind="stable")
        return _Files(numbers, found[order], tensors[order], places[order])


class _Files(NamedTuple):
    """All parts in the order of their files, in columns."""

    numbers: Mapping[str, int]
    of: NDArray[np.int32]
    tensors: NDArray[np.int32]
    places: NDArray[np.int32]


def _counted(num: int) -> NDArray[np.int32]:
    return np.arange(num, dtype=np.int32)


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON; its first line holds the checksum of all that follows.

    Raises:
        CheckpointError: a value in it is no JSON value.
    """
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
        "files": [{"path": name, **info._asdict()} for name, info in manifest.files.items()],
        "engines": {
            name: {
                "groups": [
                    {"params": list(group.params), "hyperparameters": dict(group.hyperparameters)}
                    for group in engine.groups
                ],
                "extra": dict(engine.extra),
                "aliases": dict(engine.aliases),
                "weights": _encode_tensors(engine.weights),
                "optimizer": _encode_tensors(engine.optimizer),
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


def _encode_tensors(tensors: Mapping[str, TensorIndex]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        parts = tensor.chunks
        # What another format describes is written again, tensor by tensor, and never so.
        assert isinstance(parts, Division), name
        found[name] = {
            "shape": tensor.shape,
            "dtype": NAMES[tensor.dtype],
            "files": parts.files,
            "offsets": parts.offsets,
            "sizes": parts.sizes,
        }
    return found
