"""What DeepSpeed's face keeps in a checkpoint beside what trains: a script's own, and counts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unipar.checkpoint.load import agree
from unipar.compat.readable import are_equal
from unipar.errors import CheckpointError
from unipar.world import World

log = logging.getLogger("unipar")

COUNTS = ("global_steps", "global_samples", "skipped_steps")
"""As in DeepSpeed, micro-batches go on from where they are."""


def write_kept(path: Path, rank: int, kept: Mapping[str, Any], *, ranks: int) -> None:
    """Write what an engine keeps of a rank.

    Args:
        path: the checkpoint.
        rank: whose it is.
        kept: ``client_state``, ``lr_scheduler`` and :data:`COUNTS`.
        ranks: how many have such a file, which is one unless each has its own.
    """
    torch.save({**kept, "ranks": ranks}, _file(path, rank))


def convert_kept(path: Path, each: Sequence[Mapping[str, Any]]) -> None:
    """Write what DeepSpeed itself has kept.

    Args:
        path: the checkpoint that it becomes.
        each: of every rank that has its own, or of the first alone.

    Raises:
        CheckpointError: it holds objects that a checkpoint is not read with.
    """
    try:
        for rank, kept in enumerate(each):
            write_kept(path, rank, kept, ranks=len(each))
            _read(_file(path, rank))
    except Exception as error:
        for rank in range(len(each)):
            _file(path, rank).unlink(missing_ok=True)
        raise CheckpointError(
            f"client_state, or the state of the scheduler, cannot be taken into {path}: {error}. "
            "What trains is converted."
        ) from error


def read_kept(path: Path, world: World) -> dict[str, Any] | None:
    """What an engine of this rank has kept; rank 0's, where there is no such. Collective.

    Returns:
        ``None`` where another than an engine of this face has saved the checkpoint.

    Raises:
        CheckpointError: it cannot be read on rank 0.
    """
    if not world.broadcast(_file(path, 0).is_file()):
        return None
    error = None
    if world.is_main:
        try:
            _tell_of_ranks(path, world)
        except Exception as failure:
            error = f"{path} is damaged: {failure}."
    agree(world, error)
    own = _file(path, world.rank)
    return _read(own if own.is_file() else _file(path, 0))


def _tell_of_ranks(path: Path, world: World) -> None:
    first = _read(_file(path, 0))
    ranks = first.get("ranks", 1)
    if ranks not in (1, world.size) and any(
        not are_equal(first["client_state"], _read(_file(path, rank))["client_state"])
        for rank in range(1, ranks)
    ):
        log.warning(
            "%s holds a client_state of each of %d ranks, which differ, and there are %d now. Each "
            "rank gets its own, and rank 0's where it has none.",
            path, ranks, world.size,
        )  # fmt: skip


def _file(path: Path, rank: int) -> Path:
    return path / (f"engine-{rank}.pt" if rank else "engine.pt")


def _read(file: Path) -> dict[str, Any]:
    return torch.load(file, weights_only=True, map_location="cpu")
