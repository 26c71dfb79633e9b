"""Checkpoints of a run: unipar's, which any strategy reads, and beside them what a script has."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unipar.checkpoint.directory import find
from unipar.compat.accelerate.plugins import ProjectConfiguration
from unipar.compat.readable import check_readable
from unipar.errors import CheckpointError, ConfigError
from unipar.session import Session

_HOLDS = ("schedulers", "objects")


def place_to_save(project: ProjectConfiguration, given: Any, session: Session) -> Path:
    """Where the next checkpoint goes; of those that are numbered the oldest make room. Collective.

    Raises:
        ConfigError: nothing says where, or it is there already.
    """
    if not project.automatic_checkpoint_naming:
        return _given(given)
    parent = Path(project.project_dir or ".") / "checkpoints"
    place = parent / f"checkpoint_{project.iteration}"
    if place.exists():
        raise ConfigError(
            f"{place} is there already. Set ProjectConfiguration(iteration=...) to the number to "
            "go on with."
        )
    session.world.barrier()
    if session.world.is_main and project.total_limit is not None and parent.is_dir():
        there = sorted(parent.iterdir(), key=_number)
        for old in there[: max(0, len(there) + 1 - project.total_limit)]:
            shutil.rmtree(old)
    return place


def place_to_load(project: ProjectConfiguration, given: Any) -> Path:
    """Where to read from: what is given, or the newest of those that are numbered.

    Raises:
        ConfigError: nothing says where.
    """
    parent = Path(project.project_dir or ".") / "checkpoints"
    if given is None and project.automatic_checkpoint_naming and parent.is_dir():
        there = sorted(parent.iterdir(), key=_number)
        given = there[-1] if there else None
    return _given(given)


def save(
    place: Path, session: Session, step: int, schedulers: Sequence[Any], objects: Sequence[Any]
) -> None:
    """Write engines, schedulers, objects and random numbers. Collective.

    Raises:
        CheckpointError: it cannot be written.
        ConfigError: an object's state could not be read again.
    """
    held = [one.state_dict() for one in (*schedulers, *objects)]
    for one, values in zip((*schedulers, *objects), held, strict=True):
        check_readable(values, f"save_state: the state_dict() of a {type(one).__name__}")
    path = session.save(place)
    drawn = session.world.gather(_random_numbers())
    if session.world.is_main:
        state = {
            "schedulers": held[: len(schedulers)],
            "objects": held[len(schedulers) :],
            "step": step,
            "random": drawn,
        }
        torch.save(state, _beside(path))
    session.world.barrier()


def load(place: Path, session: Session, schedulers: Sequence[Any], objects: Sequence[Any]) -> int:
    """Take over the newest checkpoint in a directory. Collective.

    Returns:
        How many micro-batches of the present step had been run.

    Raises:
        CheckpointError: there is none, or it is of another program.
    """
    path = find(place)
    session.load(path)
    # A file of the script's own, which may hold whatever its objects do.
    state = torch.load(_beside(path), map_location="cpu", weights_only=True)
    for what, own in zip(_HOLDS, (schedulers, objects), strict=True):
        if len(own) != len(state[what]):
            raise CheckpointError(
                f"{path} was saved with {len(state[what])} {what}, and this program has "
                f"{len(own)}. Prepare and register the same as when it was saved."
            )
        for one, values in zip(own, state[what], strict=True):
            one.load_state_dict(values)
    if len(state["random"]) == session.world.size:
        _restore(state["random"][session.world.rank])
    return state["step"]


def _random_numbers() -> dict[str, Any]:
    """The states of Python's and NumPy's generators, as numbers and tensors alone."""
    version, numbers, gauss = random.getstate()
    name, keys, *rest = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
    }


def _restore(state: dict[str, Any]) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


def _given(directory: Any) -> Path:
    if directory is None:
        raise ConfigError(
            "nothing says where checkpoints are. Name a directory, as in save_state('out')."
        )
    return Path(directory).expanduser()


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.script.pt")


def _number(path: Path) -> int:
    digits = re.findall(r"\d+", path.name)
    return int(digits[-1]) if digits else -1
