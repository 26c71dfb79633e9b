"""Stored weights that a model begins with: a checkpoint's, or safetensors of the hub."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from unipar.checkpoint.decode import open_checkpoint
from unipar.checkpoint.directory import find
from unipar.checkpoint.experts import fused, holds_separate
from unipar.checkpoint.huggingface import holds_safetensors, read_directory
from unipar.checkpoint.load import Source, agree
from unipar.checkpoint.manifest import EngineIndex, Manifest
from unipar.checkpoint.read import ChunkReader
from unipar.errors import CheckpointError, did_you_mean
from unipar.state import TensorState
from unipar.world import World


class StoredWeights:
    """A checkpoint's weights; a :class:`unipar.state.WeightSource`.

    Args:
        manifest: of the checkpoint.
        engine: which of its engines.
        world: the processes that read it, each what it holds.
    """

    def __init__(self, manifest: Manifest, engine: EngineIndex, world: World) -> None:
        self._manifest, self._engine, self._world = manifest, engine, world

    @classmethod
    def at(cls, path: Path, name: str, world: World) -> StoredWeights:
        """Open the weights of the engine ``name``, or of the only one. Collective.

        Raises:
            CheckpointError: there are none, on some rank.
        """
        found, error = None, None
        try:
            manifest = read_any(path)
            only = name if len(manifest.engines) > 1 else None
            found = cls(manifest, pick_engine(manifest, only), world)
        except CheckpointError as failure:
            error = str(failure)
        agree(world, error)
        assert found is not None
        return found

    def fill(self, states: Sequence[TensorState], aliases: Mapping[str, str]) -> None:
        """Fill each state's boxes. Collective.

        Args:
            states: all weights of the model.
            aliases: other names of tied ones, to their names in ``states``.

        Raises:
            CheckpointError: the checkpoint is damaged, or of another model.
        """
        names = {state.name: [state.name] for state in states}
        for alias, name in aliases.items():
            names[name].append(alias)
        # A tied weight is stored once, under whichever of its names the writer came upon first;
        # where it is stored under several, one is enough.
        known = {**dict.fromkeys(self._engine.weights), **dict.fromkeys(self._engine.aliases)}
        chosen = {
            name: next((other for other in tied if other in known), name)
            for name, tied in names.items()
        }
        spare = {other: name for name in names for other in names[name] if other != chosen[name]}
        stored = {n: tensor for n, tensor in self._engine.weights.items() if n not in spare}
        if holds_separate(stored) and not stored.keys() >= set(chosen.values()):
            # Of the hub, for a model that holds all experts of a layer in one tensor.
            stored = fused(stored)
        engine = dataclasses.replace(self._engine, weights=stored)
        Source(self._manifest, engine, self._world).fill_weights(
            [dataclasses.replace(state, name=chosen[state.name]) for state in states]
        )
        filled = {state.name: state for state in states}
        twice = {
            other: filled[name] for other, name in spare.items() if other in self._engine.weights
        }
        agree(self._world, self._differing(twice))

    def _differing(self, twice: Mapping[str, TensorState]) -> str | None:
        """Say which stored weights are not what tied ones have been filled with, on this rank."""
        with ChunkReader(self._manifest) as reader:
            for name, state in twice.items():
                stored = self._engine.weights[name]
                for box, own in zip(state.boxes, state.read(), strict=True):
                    other = torch.empty(box.sizes, dtype=own.dtype)
                    try:
                        same = stored.shape == tuple(state.shape)
                        if same:
                            reader.fill(name, stored, box, other)
                    except CheckpointError as failure:
                        return str(failure)
                    if same and torch.equal(own.detach().cpu(), other):
                        continue
                    return (
                        f"{self._manifest.path} holds '{name}' with other values than those of "
                        f"'{state.name}', and the two are one weight of this model. Build the "
                        "model with two (tie_word_embeddings=False), or store one of them."
                    )
        return None


def check_weights(path: Path) -> None:
    """Hold that a model can begin with what is stored there, as far as can be known without it.

    Raises:
        CheckpointError: there is no checkpoint, or a file is missing or damaged.
    """
    read_any(path)


def read_any(path: str | Path) -> Manifest:
    """The manifest of a checkpoint, or one made up for safetensors files, which have none."""
    path = Path(path)
    if holds_safetensors(path):
        return read_directory(path)
    return open_checkpoint(find(path))


def pick_engine(manifest: Manifest, engine: str | None) -> EngineIndex:
    """The engine of this name, or the only one.

    Raises:
        CheckpointError: there is none of this name, or no name was given and there are several.
    """
    names = ", ".join(manifest.engines)
    if engine is None and len(manifest.engines) != 1:
        raise CheckpointError(
            f"{manifest.path} holds several engines ({names}): say which, by engine='…'."
        )
    engine = engine if engine is not None else next(iter(manifest.engines))
    if engine not in manifest.engines:
        raise CheckpointError(
            f"{manifest.path} holds no engine '{engine}'; it holds {names}."
            f"{did_you_mean(engine, manifest.engines)}"
        )
    return manifest.engines[engine]
