"""The contents of a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unipar.checkpoint.initial import read_any
from unipar.checkpoint.manifest import EngineIndex, TensorIndex
from unipar.state import TensorInfo


@dataclass(frozen=True)
class EngineDescription:
    """One engine in a checkpoint.

    Attributes:
        weights: parameters and buffers, by name.
        optimizer: optimizer moments, by parameter and key.
        weight_bytes: bytes of the weights.
        optimizer_bytes: bytes of the moments.
        num_elements: elements of the weights.
        aliases: other names of tied weights.
    """

    weights: Mapping[str, TensorInfo]
    optimizer: Mapping[str, TensorInfo]
    weight_bytes: int
    optimizer_bytes: int
    num_elements: int
    aliases: Mapping[str, str]


@dataclass(frozen=True)
class Description:
    """A checkpoint; see :class:`unipar.checkpoint.Manifest`.

    Attributes:
        path: its directory.
        step: training steps taken.
        strategy: the strategy that wrote it.
        world_size: how many ranks wrote it.
        weights_only: whether it holds no training state.
        nbytes: bytes on disk, apart from the manifest.
        num_files: how many files that is.
        engines: by name.
        metrics: metrics at this step.
        progress: the loop's position.
        unipar_version: the version of unipar that wrote it; empty for bare safetensors.
        torch_version: likewise.
    """

    path: Path
    step: int
    strategy: str
    world_size: int
    weights_only: bool
    nbytes: int
    num_files: int
    engines: Mapping[str, EngineDescription]
    metrics: Mapping[str, float]
    progress: Mapping[str, Any]
    unipar_version: str
    torch_version: str


def describe(path: str | Path) -> Description:
    """Describe a checkpoint, the newest of a directory of them, or safetensors files.

    Raises:
        CheckpointError: there is none, or its manifest is damaged.
    """
    manifest = read_any(path)
    return Description(
        path=manifest.path,
        step=manifest.step,
        strategy=manifest.strategy,
        world_size=manifest.world_size,
        weights_only=manifest.weights_only,
        nbytes=manifest.nbytes,
        num_files=len(manifest.files),
        engines={name: _describe_engine(engine) for name, engine in manifest.engines.items()},
        metrics=manifest.metrics,
        progress=manifest.progress,
        unipar_version=manifest.unipar_version,
        torch_version=manifest.torch_version,
    )


def _describe_engine(engine: EngineIndex) -> EngineDescription:
    return EngineDescription(
        weights=_infos(engine.weights),
        optimizer=_infos(engine.optimizer),
        weight_bytes=sum(map(_nbytes, engine.weights.values())),
        optimizer_bytes=sum(map(_nbytes, engine.optimizer.values())),
        num_elements=sum(math.prod(tensor.shape) for tensor in engine.weights.values()),
        aliases=engine.aliases,
    )


def _infos(tensors: Mapping[str, TensorIndex]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _nbytes(tensor: TensorIndex) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize
