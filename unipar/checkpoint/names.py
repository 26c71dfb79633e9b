"""Names of the files and directories of checkpoints."""

from __future__ import annotations

from pathlib import Path

from unipar.utils.listing import REPLACED as REPLACED
from unipar.utils.listing import TEMPORARY as TEMPORARY
from unipar.utils.listing import named_step as named_step

GENERATORS = "rng"
"""The folder of the random generators, in a checkpoint."""


def step_name(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step of the checkpoint of this name, as :func:`step_name` gives it."""
    step = named_step(path.name.removeprefix(REPLACED))
    assert step is not None, path
    return step


def rng_path(rank: int) -> str:
    """The path of a rank's random number generators, relative to the checkpoint."""
    return f"{GENERATORS}/rank-{rank:05d}.json"
