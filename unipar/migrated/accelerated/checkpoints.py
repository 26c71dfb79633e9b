"""Checkpoints of a script migrated from Accelerate: engines, schedulers and random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from unipar.checkpoint.directory import find
from unipar.errors import CheckpointError, ConfigError
from unipar.migrated import script


class Checkpoints:
    """The contents of the checkpoints of a run, and their places.

    Args:
        numbered: directory of checkpoints that are numbered; ``None`` where each is named.

    Attributes:
        schedulers: the paced ones.
        objects: others with a ``state_dict()``.
    """

    def __init__(self, numbered: Path | None) -> None:
        self.schedulers: list[Any] = []
        self.objects: list[Any] = []
        self._numbered, self._count = numbered, 0

    def save(self, directory: str | Path | None, microbatches: int) -> Path:
        """Write one. Collective.

        Args:
            directory: where; ``None`` where they are numbered.
            microbatches: how many of the present step have been run.

        Raises:
            ConfigError: nothing says where.
            CheckpointError: it cannot be written.
        """
        if self._numbered is not None:
            place = self._numbered / f"checkpoint_{self._count}"
            self._count += 1
        else:
            place = _given(directory)
        world = script.world()
        path = script.session().save(place)
        if world.is_main:
            torch.save({**self._state(), "microbatches": microbatches}, _beside(path))
        world.barrier()
        return place

    def load(self, directory: str | Path | None) -> int:
        """Take over the newest in a directory. Collective.

        Returns:
            How many micro-batches of the present step had been run.

        Raises:
            ConfigError: nothing says where.
            CheckpointError: there is none, or it is of another program.
        """
        if directory is None and self._numbered is not None:
            found = sorted(self._numbered.glob("checkpoint_*"), key=lambda one: _number(one.name))
            directory = found[-1] if found else self._numbered
        path = find(_given(directory))
        script.session().load(path)
        state = torch.load(_beside(path), weights_only=True)
        own = self._state()
        for what, values in own.items():
            if len(values) != len(state[what]):
                raise CheckpointError(
                    f"{path} was saved with {len(state[what])} {what}, and this program has "
                    f"{len(values)}. Prepare the same as when it was saved."
                )
        for scheduler, values in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(values)
        for one, values in zip(self.objects, state["objects"], strict=True):
            one.load_state_dict(values)
        return state["microbatches"]

    def _state(self) -> dict[str, list[Any]]:
        return {
            "schedulers": [one.state_dict() for one in self.schedulers],
            "objects": [one.state_dict() for one in self.objects],
        }


def _given(directory: str | Path | None) -> Path:
    if directory is None:
        raise ConfigError(
            "nothing says where checkpoints are. Name a directory, as in save_state('out')."
        )
    return Path(directory)


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.script.pt")


def _number(name: str) -> int:
    digits = name.rpartition("_")[2]
    return int(digits) if digits.isdigit() else -1
