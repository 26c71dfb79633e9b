"""Holding a run's data against that of the checkpoint that it is to go on from."""

from __future__ import annotations

import logging

from unipar.checkpoint import Manifest
from unipar.data import Loader, order_differences
from unipar.errors import ConfigError

log = logging.getLogger("unipar")


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
