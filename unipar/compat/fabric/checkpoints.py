"""``fabric.save`` and ``fabric.load`` under any strategy.

What no rank divides is one file, as Fabric writes it under DDP; what ranks divide is a directory,
as Fabric has it under FSDP and DeepSpeed: a checkpoint of unipar's, written by all, and beside it
what else the state holds. Either is read under any strategy and number of ranks.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from unipar.checkpoint.directory import find
from unipar.compat.gathering import GatheredModel, GatheredOptimizer
from unipar.compat.models import PreparedModel
from unipar.compat.optimizers import PreparedOptimizer
from unipar.compat.run import own_randomness
from unipar.errors import ConfigError
from unipar.session import Session
from unipar.strategy import Engine
from unipar.utils.replacing import replacing

Filter = Callable[[str, Any], bool]


def save(path: Path, state: Any, keep: Mapping[str, Filter], session: Session) -> None:
    """Write what ``state`` holds. Collective.

    Raises:
        ConfigError: a filter is of nothing in it, or what stands there is of the other kind.
        CheckpointError: it cannot be written.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"fabric.save was given a {type(state).__name__}. Give a dict, such as "
            "{'model': model, 'optimizer': optimizer}."
        )
    if unknown := sorted({*keep} - {*state}):
        raise ConfigError(
            f"fabric.save(filter=…) names {', '.join(unknown)}, and the state has "
            f"{', '.join(state)}. Give filters for these."
        )
    by_all = _written_by_all(state, keep, session)
    found = _kept(
        {name: _state_of(one, session) for name, one in state.items() if name not in by_all}, keep
    )
    if path.is_dir() != bool(by_all) and path.exists():
        raise ConfigError(
            f"{path} is there, and is {'a directory' if path.is_dir() else 'a file'}: the strategy "
            f"'{session.strategy.name}' writes {'a directory' if by_all else 'a file'}. Name "
            "another place, or remove it."
        )
    world = session.world
    if not by_all:
        if world.is_main:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as partial:
                torch.save(found, partial)
    else:
        written = session.save(path)
        if world.is_main:
            with replacing(_beside(written)) as partial:
                torch.save({"rest": found, "held": by_all}, partial)
            # It is one checkpoint, as a file is; the one before goes when the new one is there.
            for old in path.iterdir():
                if old.is_dir() and old.name != written.name and _beside(old).exists():
                    _beside(old).unlink()
                    shutil.rmtree(old)
    world.barrier()


def load(
    path: Path, state: Any, session: Session, *, strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Take over what is written. Collective.

    Returns:
        What is left over.

    Raises:
        ConfigError: something that is asked for is not in it.
        CheckpointError: it is damaged, or of another model.
    """
    held: list[str] = []
    directory = find(path) if path.is_dir() else None
    file = path if directory is None else _beside(directory)
    found = torch.load(file, map_location="cpu", weights_only=weights_only)
    if directory is not None:
        found, held = found["rest"], found["held"]
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"{path} was written by all ranks. Load it into what it is of: "
                f"fabric.load(path, {{{', '.join(f'{name!r}: …' for name in held)}}})."
            )
    if state is None:
        return found
    if isinstance(state, (nn.Module, Optimizer)):
        _take(state, found, session, strict=strict)
        return {}
    missing = [name for name in state if name not in found and name not in held]
    if missing and strict:
        raise ConfigError(
            f"{path} holds {', '.join([*held, *found])}, and not {', '.join(missing)}. "
            "Leave these out of the state, or pass strict=False."
        )
    if taken := [state[name] for name in held if name in state]:
        assert directory is not None
        _take_checkpoint(directory, taken, session)
    assert isinstance(state, MutableMapping)
    for name in [name for name in state if name in found]:
        value = found.pop(name)
        if hasattr(state[name], "load_state_dict"):
            _take(state[name], value, session, strict=strict)
        else:
            state[name] = value
    return found


def _beside(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.script.pt")


def _written_by_all(
    state: Mapping[str, Any], keep: Mapping[str, Filter], session: Session
) -> list[str]:
    """The names of what a checkpoint of all ranks holds; none where it would hold more."""
    engines: dict[str, Engine] = {}
    for name, one in state.items():
        training = getattr(one, "training_by", None) or getattr(one, "training", None)
        if isinstance(one, (PreparedModel, PreparedOptimizer)) and training and name not in keep:
            engines[name] = training.engine
    models = {id(one) for name, one in engines.items() if isinstance(state[name], PreparedModel)}
    divided = any(engine_of(state[name], session) for name in engines)
    every = {id(one) for one in session.engines.values()}
    return list(engines) if divided and models == every else []


def engine_of(value: Any, session: Session) -> Engine | None:
    """The engine of a model or an optimizer that the strategy divides among ranks, if it does."""
    if isinstance(value, PreparedModel):
        parts, training = {"parameters"}, value.training_by
    elif isinstance(value, PreparedOptimizer):
        parts, training = {"parameters", "optimizer"}, value.training
    else:
        return None
    return training.engine if training and session.capabilities.sharded & parts else None


def _take_checkpoint(directory: Path, objects: Sequence[Any], session: Session) -> None:
    models = [one for one in objects if isinstance(one, PreparedModel) and one.training_by]
    optimizers = [one for one in objects if isinstance(one, PreparedOptimizer) and one.training]
    num = len(session.engines)
    if len(models) != num or len(optimizers) not in (0, num) or not num:
        raise ConfigError(
            f"{directory} was written by all ranks, and holds every model that was set up then. "
            "Set them up with their optimizers, and give all of them in the state: each with its "
            "optimizer, or none with one."
        )
    # Fabric leaves a script's random numbers as they are.
    with own_randomness(session.world.device):
        session.load(directory, optimizer=bool(optimizers))


def _kept(states: Mapping[str, Any], keep: Mapping[str, Filter]) -> dict[str, Any]:
    """What filters leave of state dicts, as in Fabric: nothing of one, and it is left out."""
    found: dict[str, Any] = {}
    for name, state in states.items():
        if name not in keep or not isinstance(state, dict):
            found[name] = state
        elif left := {k: v for k, v in state.items() if keep[name](k, v)}:
            found[name] = left
    return found


def _state_of(value: Any, session: Session) -> Any:
    engine = engine_of(value, session)
    if engine is not None:
        kind = GatheredOptimizer if isinstance(value, Optimizer) else GatheredModel
        return kind(engine, session.world, rank0_only=True).state_dict()
    return value.state_dict() if hasattr(value, "state_dict") else value


def _take(value: Any, state: Mapping[str, Any], session: Session, *, strict: bool) -> None:
    engine = engine_of(value, session)
    if isinstance(value, Optimizer):
        named = any(isinstance(name, str) for name in state["state"])
        if engine is not None and not named:
            state = _by_name(engine, state)
        if named and engine is None and isinstance(value, PreparedOptimizer) and value.training:
            engine = value.training.engine
        if engine is not None:
            GatheredOptimizer(engine, session.world, rank0_only=True).load_state_dict(state)
        else:
            value.load_state_dict(dict(state))
    elif engine is not None:
        gathered = GatheredModel(engine, session.world, rank0_only=True)
        gathered.load_state_dict(state, strict=strict)
    elif isinstance(value, nn.Module):
        inner = value.module if isinstance(value, PreparedModel) else value
        inner.load_state_dict(state, strict=strict)
    else:
        value.load_state_dict(state)


def _by_name(engine: Engine, state: Mapping[str, Any]) -> dict[str, Any]:
    """A plain optimizer's state dict by the names of parameters instead of by their numbers."""
    names = [group.params for group in engine.export_state().groups]
    every = [name for group in names for name in group]
    return {
        "state": {every[number]: values for number, values in state["state"].items()},
        "param_groups": [
            {**group, "params": list(own)}
            for group, own in zip(state["param_groups"], names, strict=True)
        ],
    }
