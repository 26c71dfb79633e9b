"""Reading a checkpoint: each rank the parts that it holds, verified as they are read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from unipar.checkpoint.boxes import intersect, is_run, part
from unipar.checkpoint.directory import find
from unipar.checkpoint.files import FileReader, as_bytes
from unipar.checkpoint.manifest import Chunk, EngineIndex, Manifest, TensorIndex, read_manifest
from unipar.checkpoint.mismatch import check_names
from unipar.checkpoint.rng import reseed, restore_rng
from unipar.errors import CheckpointError
from unipar.state import Box, GroupState, LocalState, TensorInfo, TensorState, named_weights
from unipar.strategy import Engine, ModelFactory
from unipar.world import World


def load(
    path: str | Path, engines: Mapping[str, Engine], world: World, *, optimizer: bool = True
) -> Manifest:
    """Restore engines and random generators from a checkpoint. Collective.

    Args:
        path: a checkpoint, or a directory of them, of which the newest is taken.
        engines: by the names that they were saved under.
        world: the joined processes, any number of them.
        optimizer: whether to restore more than the weights.

    Returns:
        What the checkpoint says of itself.

    Raises:
        CheckpointError: it is damaged, or of another model; raised on every rank.
    """
    problem: CheckpointError | None = None
    manifest: Manifest | None = None
    try:
        manifest = read_manifest(find(path))
        _check_engines(manifest, engines)
        with _Files(manifest) as files:
            for name, engine in engines.items():
                whole = optimizer and not manifest.weights_only
                engine.import_state(StoredState(manifest.engines[name], files), optimizer=whole)
    except CheckpointError as error:
        problem = error
    problems = world.gather(str(problem) if problem else "")
    if problem is not None:
        raise problem
    for rank, text in enumerate(problems):
        if text:
            raise CheckpointError(f"rank {rank}: {text}")
    assert manifest is not None
    if optimizer and not manifest.weights_only:
        _restore_generators(manifest, world)
    return manifest


def load_model(
    path: str | Path, model: nn.Module | ModelFactory, *, engine: str | None = None
) -> nn.Module:
    """Load a checkpoint's weights into a model, for inference; no process group is needed.

    Args:
        path: a checkpoint, or a directory of them, of which the newest is taken.
        model: a module, or a function that builds one.
        engine: which engine's weights; needed only where several were saved.

    Returns:
        The module, its weights replaced in place.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    manifest = read_manifest(find(path))
    if engine is None:
        if len(manifest.engines) > 1:
            raise CheckpointError(
                f"{manifest.path} holds {len(manifest.engines)} models "
                f"({', '.join(manifest.engines)}): say which, by engine='…'."
            )
        engine = next(iter(manifest.engines))
    module = model if isinstance(model, nn.Module) else model()
    weights, _ = named_weights(module)
    with _Files(manifest) as files:
        StoredState(manifest.engines[engine], files).fill_weights(
            [LocalState.of(name, tensor) for name, tensor in weights.items()]
        )
    return module


def _check_engines(manifest: Manifest, engines: Mapping[str, Engine]) -> None:
    missing = [name for name in engines if name not in manifest.engines]
    if missing:
        raise CheckpointError(
            f"{manifest.path} holds no engine named {', '.join(missing)}; it holds "
            f"{', '.join(manifest.engines)}. Prepare the model under the name it was saved with: "
            "session.prepare(model, name='…')."
        )


def _restore_generators(manifest: Manifest, world: World) -> None:
    states = manifest.progress.get("rng", [])
    if len(states) == world.size:
        restore_rng(states[world.rank])
    else:
        reseed(int(manifest.progress.get("seed", 0)), world.rank, manifest.step)


class _Files:
    """The checkpoint's files, each opened when it is first needed."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._open: dict[str, FileReader] = {}

    def __getitem__(self, name: str) -> FileReader:
        if name not in self._open:
            info = self._manifest.files[name]
            header = (info.header_bytes, info.header_digest) if info.header_digest else None
            self._open[name] = FileReader(self._manifest.path / name, info.size, header)
        return self._open[name]

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._open.values():
            file.close()


class StoredState:
    """One engine's stored state; a :class:`unipar.state.StateSource`."""

    def __init__(self, index: EngineIndex, files: _Files) -> None:
        self._index, self._files = index, files
        self.weights = {name: TensorInfo(t.shape, t.dtype) for name, t in index.weights.items()}
        self.optimizer: dict[str, dict[str, TensorInfo]] = {}
        for name, tensor in index.optimizer.items():
            parameter, _, key = name.rpartition(".")
            info = TensorInfo(tensor.shape, tensor.dtype)
            self.optimizer.setdefault(parameter, {})[key] = info
        self.groups: tuple[GroupState, ...] = index.groups
        self.extra = index.extra

    def fill_weights(self, states: Iterable[TensorState]) -> None:
        states = list(states)
        check_names(states, self._index.weights, strict=True)
        self._fill(states, self._index.weights)

    def fill_optimizer(self, states: Iterable[TensorState]) -> None:
        # A rank asks only for the moments of its own parameters.
        states = list(states)
        check_names(states, self._index.optimizer, strict=False)
        self._fill(states, self._index.optimizer)

    def _fill(self, states: Iterable[TensorState], index: Mapping[str, TensorIndex]) -> None:
        for state in states:
            stored = index[state.name]
            if state.in_place:
                for box, tensor in zip(state.boxes, state.read(), strict=True):
                    self._fill_box(state.name, stored, box, tensor.detach())
            else:
                tensors = [torch.empty(box.sizes, dtype=stored.dtype) for box in state.boxes]
                for box, tensor in zip(state.boxes, tensors, strict=True):
                    self._fill_box(state.name, stored, box, tensor)
                state.write(tensors)

    def _fill_box(self, name: str, stored: TensorIndex, box: Box, out: torch.Tensor) -> None:
        for chunk in stored.chunks:
            common = intersect(chunk.box, box)
            if common is None:
                continue
            target = part(out, box.offsets, common)
            direct = (
                target.device.type == "cpu"
                and target.dtype == stored.dtype
                and target.is_contiguous()
                and is_run(common.sizes, chunk.box.sizes)
            )
            if direct:
                self._read(name, chunk, _first(common, chunk.box), target)
            else:
                target.copy_(self._read_rows(name, stored, chunk, common))

    def _read_rows(self, name: str, stored: TensorIndex, chunk: Chunk, common: Box) -> torch.Tensor:
        """The common part, out of the chunk's rows that it spans."""
        if not common.sizes:
            scalar = torch.empty((), dtype=stored.dtype)
            self._read(name, chunk, 0, scalar)
            return scalar
        rows = Box(
            (common.offsets[0], *chunk.box.offsets[1:]), (common.sizes[0], *chunk.box.sizes[1:])
        )
        buffer = torch.empty(rows.sizes, dtype=stored.dtype)
        self._read(name, chunk, _first(rows, chunk.box), buffer)
        return part(buffer, rows.offsets, common)

    def _read(self, name: str, chunk: Chunk, first: int, out: torch.Tensor) -> None:
        """Fill ``out``, contiguous, with the chunk's elements from the ``first`` on."""
        itemsize = out.dtype.itemsize
        self._files[chunk.file].read(
            as_bytes(out),
            chunk.start,
            first * itemsize,
            math.prod(chunk.box.sizes) * itemsize,
            chunk.digests,
            lambda: f"tensor '{name}'",
        )


def _first(inner: Box, outer: Box) -> int:
    """The position of the first element of ``inner`` in a row-major array of ``outer``."""
    position = 0
    for start, base, size in zip(inner.offsets, outer.offsets, outer.sizes, strict=True):
        position = position * size + (start - base)
    return position
