"""Names of the files and directories of checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

TEMPORARY = ".tmp-"
REPLACED = ".old-"
GENERATORS = "rng"
"""The folder of the random generators, in a checkpoint."""
_NAME = re.compile(r"step-(\d{8,})", re.ASCII)


def step_name(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """The step of the checkpoint of this name, as :func:`step_name` gives it."""
    step = named_step(path.name)
    assert step is not None, path
    return step


def named_step(name: str) -> int | None:
    """The step that a directory is named after; ``None`` where it is no checkpoint's name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def rng_path(rank: int) -> str:
    """The path of a rank's random number generators, relative to the checkpoint."""
    return f"{GENERATORS}/rank-{rank:05d}.json"
