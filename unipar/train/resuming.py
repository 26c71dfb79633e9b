"""The checkpoint that a run resumes from: loading it, and holding the run's data against its."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from unipar import checkpoint
from unipar.checkpoint import Manifest
from unipar.data import Loader, order_differences
from unipar.errors import ConfigError
from unipar.strategy import Engine
from unipar.world import World

log = logging.getLogger("unipar")


def load(
    wanted: Literal["auto"] | Path | None,
    directory: Path | None,
    engines: Mapping[str, Engine],
    world: World,
) -> Manifest | None:
    """Load the checkpoint that a run goes on from, if there is one. Collective.

    Args:
        wanted: ``"auto"`` for the newest of the run's own, a path, or none.
        directory: holds the run's own checkpoints; a run that was restarted goes on from these.
        engines: what to fill, by name.
        world: the joined processes.
    """
    found = None
    if directory is not None and (wanted == "auto" or world.placement.restart > 0):
        found = checkpoint.load_newest(directory, engines, world)
    if found is None and isinstance(wanted, Path):
        found = checkpoint.load(wanted, engines, world)
    return found


def check_same_order(manifest: Manifest, loader: Loader) -> None:
    """Refuse to go on over data whose order would be another than that of the run until now.

    A checkpoint that does not say it, being of an older unipar or of the weights alone, is let
    pass.

    Raises:
        ConfigError: what is different, and what it has to be.
    """
    progress, own = manifest.progress, loader.order
    # Older checkpoints have the first two beside the loader's place.
    beside = {key: progress[key] for key in ("seed", "global_batch_size") if key in progress}
    stored = {**beside, **progress.get("loader", {})}
    problems = [
        f"the checkpoint {manifest.path} was made with {_said(name, was)}, and this run has "
        f"{_said(name, now)}: {_REMEDIES.get(name, _ANOTHER_ORDER).format(name=name, was=was)}"
        for name, was, now in order_differences(stored, own)
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    unsaid = [name for name, now in own.items() if now is not None and name not in stored]
    if unsaid and not manifest.weights_only:
        log.info("%s does not say its %s, which is not checked", manifest.path, ", ".join(unsaid))


_ANOTHER_ORDER = "the order of its data would be another. Set {name}={was}."
_REMEDIES = {
    "global_batch_size": "its place in the data would be another. Set global_batch_size={was}; "
    "micro_batch_size and devices are free to change.",
    "num_samples": "the samples of its steps would be others. Give the same data, or begin a new "
    "run from the checkpoint's weights (unipar.load_model).",
    "drop_last": "its epochs would have another number of steps. Give a DataLoader with "
    "drop_last={was}.",
}


def _said(name: str, value: object) -> str:
    return f"{value} samples of data" if name == "num_samples" else f"{name}={value}"
