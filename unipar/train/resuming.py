"""The checkpoint that a run resumes from: loading it, and holding the run's data against its."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from unipar import checkpoint
from unipar.checkpoint import Manifest
from unipar.data import Loader, order_differences
from unipar.errors import CheckpointError, ConfigError
from unipar.strategy import Engine
from unipar.train.job import Job
from unipar.world import World

log = logging.getLogger("unipar")


def load(
    wanted: Literal["auto"] | Path | str | None,
    job: Job,
    engines: Mapping[str, Engine],
    world: World,
    *,
    left: Path | None = None,
    own_first: bool = False,
) -> Manifest | None:
    """Load the checkpoint that a run goes on from, if there is one. Collective.

    Args:
        wanted: ``"auto"`` for the newest of the run's own, a path or a URL, or none.
        job: whose own checkpoints are looked for; a run that was restarted goes on from these.
        engines: what to fill, by name.
        world: the joined processes.
        left: what a group of other ranks has left of this run, which comes before all else.
        own_first: whether the run's own come before a path, as after a restart.
    """
    if left is not None:
        return checkpoint.load(left, engines, world)
    found, directory = None, job.checkpoint_dir
    own = wanted == "auto" or own_first or world.placement.restart > 0
    if directory is not None and own:
        if job.remote is not None:
            _bring_newest(job.remote, directory, world)
        found = checkpoint.load_newest(directory, engines, world)
    elif job.remote is not None and world.placement.local_rank == 0:
        # A later restart of this run would take it for its own.
        checkpoint.forget(job.remote)
    if found is None and isinstance(wanted, Path):
        found = checkpoint.load(wanted, engines, world)
    if found is None and isinstance(wanted, str) and wanted != "auto":
        found = _load_from(wanted, job.output_dir / ".fetched", engines, world)
    return found


def _bring_newest(url: str, directory: Path, world: World) -> None:
    """Have the newest sound checkpoint on every disk: from hosts, else from a URL. Collective."""
    disks = checkpoint.find_disks(directory, world)
    own = checkpoint.put_together(directory, checkpoint.kept_for_others(url), disks, world)
    # Steps that cannot be read, and why.
    passed: dict[int, str] = {}
    while True:
        step, passed = _choose_step(url, own, passed, world)
        if step is None:
            return
        _bring(url, step, directory, disks, world)
        damage = None
        if disks.writers[world.rank] == world.rank:
            damage = _damage(directory / checkpoint.step_name(step))
        damage = next(filter(None, world.gather(damage)), None)
        if damage is None:
            return
        log.warning("Passing over step %d in %s: %s", step, url, damage)
        passed[step] = damage


def _choose_step(
    url: str, own: int | None, passed: dict[int, str], world: World
) -> tuple[int | None, dict[int, str]]:
    """The newest step at a URL to copy, if it is newer than what disks have; and those passed over.

    Args:
        url: of the directory of checkpoints.
        own: the newest step that every disk has whole.
        passed: steps that cannot be read, and why.
        world: the run's processes.
    """
    step: int | None = None

    def choose() -> None:
        nonlocal step
        remote = checkpoint.RemoteDirectory(url)
        for there in checkpoint.tried(remote.steps, "Looking for checkpoints"):
            if own is not None and own >= there:
                return
            if there in passed:
                continue
            try:
                checkpoint.tried(lambda at=there: remote.manifest(at), f"Looking at step {there}")
            except checkpoint.Unreachable:
                # Not for that does a run begin afresh, or from what is older.
                raise
            except CheckpointError as error:
                log.warning("Passing over step %d in %s: %s", there, url, error)
                passed[there] = str(error)
            else:
                step = there
                return
        if passed and own is None:
            raise CheckpointError(
                f"None of the {len(passed)} checkpoints in {url} can be read:\n"
                + "\n".join(passed.values())
                + "\nRestore one of them, or choose another URL to begin afresh."
            )

    checkpoint.together(world, choose if world.is_main else None)
    return world.broadcast((step, passed))


def _damage(path: Path) -> str | None:
    """What is wrong with a checkpoint that was copied, which is removed then, or ``None``."""
    try:
        checkpoint.verify(path)
    except CheckpointError as error:
        shutil.rmtree(path, ignore_errors=True)
        return str(error).splitlines()[0]
    return None


def _load_from(url: str, directory: Path, engines: Mapping[str, Engine], world: World) -> Manifest:
    """Load the checkpoint at a URL, which may be another run's, by a copy of it. Collective."""
    disks = checkpoint.find_disks(directory, world)
    found: tuple[str, int] | None = None

    def choose() -> None:
        nonlocal found
        remote, step = checkpoint.located(url)
        found = remote.url, step

    checkpoint.together(world, choose if world.is_main else None)
    found = world.broadcast(found)
    assert found is not None
    try:
        _bring(*found, directory, disks, world)
        return checkpoint.load(directory, engines, world)
    finally:
        if disks.writers[world.rank] == world.rank:
            shutil.rmtree(directory, ignore_errors=True)


def _bring(url: str, step: int, directory: Path, disks: checkpoint.Disks, world: World) -> None:
    # Whole, and once for each disk: a rank that reads its part needs local files, and what ranks
    # hold of the same tensors would travel for each of them.
    log.info("copying step %d from %s", step, url)

    def fetch() -> None:
        remote = checkpoint.RemoteDirectory(url)
        checkpoint.tried(
            lambda: remote.fetch(step, directory, checkpoint.everything), f"Copying step {step}"
        )

    checkpoint.together(world, fetch if disks.writers[world.rank] == world.rank else None)


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
