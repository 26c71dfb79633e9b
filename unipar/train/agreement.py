"""Agreement: what all ranks of a run must have been started with alike."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from unipar.data import batch_size_of, in_words
from unipar.errors import ConfigError
from unipar.train import directories
from unipar.train.job import Job
from unipar.world import World

_OWN = frozenset(
    {
        "device", "devices", "launcher", "log_every", "log_level", "loggers", "num_nodes",
        "num_workers",
        "output_dir", "progress", "resume", "self_test", "timeout",
    }
)  # fmt: skip
"""Settings that rank 0 alone acts on, or that may differ between machines."""


def agree(job: Job, world: World, claim: contextlib.ExitStack) -> Job:
    """Take the run's directories, and hold that all ranks were started alike. Collective.

    Returns:
        The job, with rank 0's directories: processes that a launcher started have named them each
        by its own clock.
    """
    refused = None
    if world.is_main:
        try:
            restarted = world.placement.restart > 0
            claim.enter_context(directories.claimed(job, restarted=restarted))
        except ConfigError as error:
            refused = str(error)
    told = world.gather((job.output_dir, job.checkpoint_dir, refused, started_with(job)))
    output_dir, checkpoint_dir, refused, _ = told[0]
    refused = refused or differences([started for *_, started in told])
    if refused is not None:
        raise ConfigError(refused)
    return dataclasses.replace(job, output_dir=output_dir, checkpoint_dir=checkpoint_dir)


def started_with(job: Job) -> dict[str, Any]:
    """Return what this rank was started with, by the name that a message gives it.

    Ranks that differ in it would take different steps, and wait for each other without end.
    """
    config = job.config
    settings = config.model_dump(mode="json", by_alias=True, exclude=set(_OWN))
    if isinstance(settings["checkpoint"], dict):
        del settings["checkpoint"]["directory"]
    return {
        "data": in_words(job.data),
        "eval_data": None if job.eval_data is None else in_words(job.eval_data),
        **settings,
        "global_batch_size": config.global_batch_size or batch_size_of(job.data),
        "initial_weights": _where_from(config.initial_weights),
        "resume": "a path" if isinstance(config.resume, Path) else config.resume,
        "lr_scheduler": settings["lr_scheduler"] or ("given" if job.lr_scheduler else None),
        "metrics": sorted(job.metrics or {}),
    }


def _where_from(asked: str | Path) -> str:
    # Machines may have the same files in different places.
    return "a path" if isinstance(asked, Path) else asked


def differences(started: Sequence[Mapping[str, Any]]) -> str | None:
    """One line for each thing that ranks were started with differently, or ``None``.

    Args:
        started: :func:`started_with` of each rank.
    """
    lines: list[str] = []
    for name in started[0]:
        ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(started):
            ranks.setdefault(str(one[name]), []).append(rank)
        if len(ranks) > 1:
            told = "; ".join(f"{value} on {_said(own)}" for value, own in ranks.items())
            lines.append(f"  {name}: {told}")
    if not lines:
        return None
    return (
        "the ranks of this run were not all started with the same:\n"
        + "\n".join(lines)
        + "\nStart each with the same script and arguments, and give each all of the data: unipar "
        "divides it among them."
    )


def _said(ranks: Sequence[int]) -> str:
    """Numbers of ranks in words, neighbors as a range."""
    runs: list[str] = []
    for _, group in itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in group]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs)}"
