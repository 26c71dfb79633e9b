"""Loading: each rank reads what it holds, from a checkpoint of any strategy and world size."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from unipar.checkpoint import rng
from unipar.checkpoint.decode import open_checkpoint
from unipar.checkpoint.differences import describe_differences
from unipar.checkpoint.directory import find
from unipar.checkpoint.files import FileReader
from unipar.checkpoint.manifest import EngineIndex, Manifest, TensorIndex
from unipar.checkpoint.names import rng_path
from unipar.checkpoint.paths import inside
from unipar.checkpoint.read import ChunkReader
from unipar.checkpoint.training import other_training, overridden_values, training_values
from unipar.errors import CheckpointError, ConfigError
from unipar.state import GroupState, TensorInfo, TensorState
from unipar.strategy import Engine
from unipar.world import World

logger = logging.getLogger(__name__)


def agree(world: World, error: str | None) -> None:
    """Raise on every rank if any rank has an error, so that none waits for one that has left."""
    errors = world.gather(error)
    failed = [rank for rank, text in enumerate(errors) if text]
    if failed:
        everywhere = len(failed) == world.size and len(set(errors)) == 1
        text = errors[failed[0]]
        failure = CheckpointError(text if everywhere else f"Rank {failed[0]}: {text}")
        failure.agreed = True
        raise failure


class Source:
    """A stored engine as :class:`unipar.state.StateSource`; its ``fill_…`` are collective.

    Args:
        manifest: of the checkpoint.
        engine: which of its engines.
        world: the run's processes.
        refusal: why it must not be loaded even if it is of the same model.
    """

    def __init__(
        self, manifest: Manifest, engine: EngineIndex, world: World, refusal: str | None = None
    ) -> None:
        self._manifest, self._engine, self._world = manifest, engine, world
        self._refusal = refusal
        self.weights: Mapping[str, TensorInfo] = _infos(engine.weights)
        moments: dict[str, dict[str, TensorInfo]] = {}
        for name, info in _infos(engine.optimizer).items():
            parameter, _, key = name.rpartition(".")
            moments.setdefault(parameter, {})[key] = info
        self.optimizer: Mapping[str, Mapping[str, TensorInfo]] = moments
        self.groups: tuple[GroupState, ...] = engine.groups
        self.extra: Mapping[str, Any] = engine.extra

    def fill_weights(self, states: Iterable[TensorState]) -> None:
        """Fill each state's boxes from the stored weights of the same name. Collective.

        Raises:
            CheckpointError: names or shapes differ, or a file is missing, short or corrupt. Raised
                on every rank; some weights may have been filled by then.
            ConfigError: the training state must not be loaded; raised before anything is filled.
        """
        self._fill("weights", list(states), self._engine.weights, exact=True)

    def fill_optimizer(self, states: Iterable[TensorState]) -> None:
        """Fill each state's boxes from the stored moments of the same name. Collective.

        A rank may ask for the moments of its own parameters only.

        Raises:
            CheckpointError: as :meth:`fill_weights`.
        """
        self._fill("optimizer moments", list(states), self._engine.optimizer, exact=False)

    def _fill(
        self,
        what: str,
        states: list[TensorState],
        stored: Mapping[str, TensorIndex],
        *,
        exact: bool,
    ) -> None:
        names = {state.name: self._stored_name(state.name, stored) for state in states}
        wanted = {names[state.name]: tuple(state.shape) for state in states}
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        error = describe_differences(what, self._manifest.path, wanted, shapes, exact=exact)
        agree(self._world, error)
        if self._refusal is not None:
            raise ConfigError(self._refusal)
        with ChunkReader(self._manifest) as reader:
            for state in states:
                # After an error the rest are still taken through read and write, which may be
                # collective, and the ranks agree on the error at the end.
                targets = (
                    state.read()
                    if state.in_place
                    else [torch.empty(box.sizes, dtype=state.dtype) for box in state.boxes]
                )
                if error is None:
                    try:
                        for box, target in zip(state.boxes, targets, strict=True):
                            reader.fill(state.name, stored[names[state.name]], box, target)
                    except CheckpointError as failure:
                        error = str(failure)
                if not state.in_place:
                    state.write(targets)
        agree(self._world, error)

    def _stored_name(self, name: str, stored: Mapping[str, TensorIndex]) -> str:
        """The name that a tensor, or a moment of it, is stored under if its weight is tied."""
        aliases = self._engine.aliases
        if name in stored:
            return name
        if name in aliases:
            return aliases[name]
        parameter, _, key = name.rpartition(".")
        return f"{aliases[parameter]}.{key}" if parameter in aliases else name


def _infos(tensors: Mapping[str, TensorIndex]) -> dict[str, TensorInfo]:
    return {name: TensorInfo(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def load_one(
    path: Path,
    engines: Mapping[str, Engine],
    world: World,
    *,
    optimizer: bool,
    scheduler: bool,
) -> Manifest:
    """Restore engines from one checkpoint, as :func:`unipar.checkpoint.load`. Collective."""
    manifest: Manifest | None = None
    error = None
    try:
        manifest = open_checkpoint(find(path))
    except CheckpointError as failure:
        error = str(failure)
    agree(world, error)
    assert manifest is not None
    optimizer = optimizer and not manifest.weights_only
    refusals = other_training(manifest, engines, scheduler=scheduler) if optimizer else []
    seen = world.gather((manifest.path.name, refusals))
    found = sorted({name for name, _ in seen})
    if len(found) > 1:
        raise CheckpointError(
            f"Ranks see different checkpoints in {path}: {', '.join(found)}. The directory must be "
            "on a filesystem that all ranks share."
        )
    refusals = next((own for _, own in seen if own), [])
    given = training_values(engines, scheduler=scheduler)
    try:
        _check_engines(manifest, engines, exact=optimizer)
        for name, engine in engines.items():
            stored, refusal = manifest.engines[name], "\n".join(refusals) or None
            engine.import_state(Source(manifest, stored, world, refusal), optimizer=optimizer)
        if optimizer:
            _restore_generators(manifest, world)
    except CheckpointError as failure:
        if failure.agreed:
            raise
        # This rank left early; the others learn of it where they next agree, whichever that is.
        error = str(failure)
        if str(manifest.path) not in error:
            error = f"{manifest.path}: {error}"
    agree(world, error)
    overridden = overridden_values(given, training_values(engines, scheduler=scheduler))
    if overridden and world.is_main:
        logger.warning(
            "%s goes on with its own values, not those given now: %s. To train with others, begin "
            "a new run from its weights (unipar.load_model)",
            manifest.path,
            "; ".join(overridden),
        )
    return manifest


def _check_engines(manifest: Manifest, engines: Mapping[str, Engine], *, exact: bool) -> None:
    missing = engines.keys() - manifest.engines.keys()
    unexpected = manifest.engines.keys() - engines.keys() if exact else set()
    if missing or unexpected:
        raise CheckpointError(
            f"{manifest.path} holds the engines {', '.join(manifest.engines)}, and this run has "
            f"{', '.join(engines)}. Prepare each model under the name it was saved with: "
            "session.prepare(model, name='…')."
        )


def _restore_generators(manifest: Manifest, world: World) -> None:
    streams = [world.layout.stream(rank) for rank in range(world.size)]
    # Ranks that hold parts of the same layers draw alike, and no others do.
    stored = manifest.progress.get("streams", list(range(manifest.world_size)))
    if stored != streams or rng_path(world.rank) not in manifest.files:
        rng.reseed(int(manifest.progress.get("seed", 0)), streams[world.rank], manifest.step)
        return
    rng.restore(read_generators(manifest, world.rank))


def read_generators(manifest: Manifest, rank: int) -> rng.State:
    """The stored state of a rank's random number generators.

    Raises:
        CheckpointError: its file is missing, damaged, or holds something else.
    """
    info = manifest.files[rng_path(rank)]
    with FileReader(inside(manifest.path, rng_path(rank)), info.size) as reader:
        return rng.decode(reader.header(info.header_bytes, info.header_digest), reader.path)
