"""The directories of a run: that they can be written, and that no other run is using them."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from unipar import checkpoint
from unipar.errors import CheckpointError, ConfigError
from unipar.launch import elastic
from unipar.train import lock
from unipar.train.job import Job


def unused(directory: Path) -> Path:
    """Return a directory that does not exist, for runs of one name may begin in the same second."""
    names = (directory.with_name(f"{directory.name}-{number}") for number in itertools.count(2))
    return next(one for one in itertools.chain([directory], names) if not one.exists())


def check(job: Job, *, alone: bool) -> None:
    """Make a run's directories before its processes are started.

    Args:
        job: whose directories.
        alone: whether the run is in this process, and starts no others.

    Raises:
        ConfigError: they cannot be written, or another run is using them.
    """
    if not alone and job.remote is not None and job.remote.startswith("memory:"):
        raise ConfigError(
            f"{job.remote} is the memory of one process, and this run starts others, with which "
            "its checkpoints would be gone. Give a path, or the URL of a store, such as "
            "s3://bucket/run."
        )
    with _explained():
        lock.refuse_if_held(*_made(job))
    _check_remote(job, restarted=False)


@contextlib.contextmanager
def held(job: Job) -> Iterator[None]:
    """Hold a run's directories for the length of the block.

    Raises:
        ConfigError: they cannot be written, or another run is using them.
    """
    with contextlib.ExitStack() as stack:
        with _explained():
            stack.enter_context(lock.held(*_made(job)))
        yield


@contextlib.contextmanager
def claimed(job: Job, *, restarted: bool) -> Iterator[None]:
    """Hold a run's directories for the length of the block, and write its config.

    Where the number of ranks may change, the launching process holds them already.

    Args:
        job: whose directories.
        restarted: whether the run has begun before, in processes that failed.

    Raises:
        ConfigError: they cannot be written, or another run is using them.
    """
    with contextlib.ExitStack() as stack:
        if elastic.member() is None:
            stack.enter_context(held(job))
        with _explained():
            values = job.config.model_dump(mode="json", by_alias=True)
            (job.output_dir / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        _check_remote(job, restarted=restarted)
        yield


def _check_remote(job: Job, *, restarted: bool) -> None:
    if job.remote is None:
        return
    try:
        remote = checkpoint.RemoteDirectory(job.remote)
        remote.check()
        steps = remote.steps()
    except CheckpointError as error:
        raise ConfigError(f"{error} Nothing was trained.") from error
    if steps and not restarted:
        refuse_used(job, job.remote, checkpoint.step_name(steps[0]), "URL")


def refuse_used(job: Job, directory: Path | str, newest: str, what: str) -> None:
    """Refuse to begin where the newest checkpoint is not the one that the run goes on from.

    When ranks are restarted, and when old checkpoints are removed, the highest step counts.

    Args:
        job: what the run is to go on from, and where its own checkpoints are.
        directory: of checkpoints: the job's own, or where it copies them.
        newest: the name of the newest in it.
        what: how the user chooses another.

    Raises:
        ConfigError: it is not.
    """
    resume = job.config.resume
    if resume == "auto" or _is_own(job, resume, newest):
        return
    held = f"{directory} holds checkpoints of an earlier run (the newest is {newest})"
    if resume is None:
        raise ConfigError(
            f"{held}. Pass resume='auto' to go on from there, or choose another {what}."
        )
    raise ConfigError(
        f"{held}, and this one is to go on from {resume}. From then on the newest in there would "
        "count: ranks that are restarted would go on from it, and what is older would be removed. "
        f"Choose another {what}, remove what is newer (unipar checkpoints rm), or pass "
        f"resume='auto' to go on from {newest}."
    )


def _is_own(job: Job, resume: Path | str | None, name: str) -> bool:
    """Whether ``resume`` is the checkpoint of this name among the job's own."""
    if isinstance(resume, Path):
        path = checkpoint.find(resume).resolve()
        assert job.checkpoint_dir is not None
        return path == job.checkpoint_dir.resolve() / name
    return job.remote is not None and str(resume).rstrip("/") in (
        job.remote,
        f"{job.remote}/{name}",
    )


def _made(job: Job) -> list[Path]:
    directories = [job.output_dir]
    if job.checkpoint_dir is not None:
        directories.append(job.checkpoint_dir)
    for directory in directories:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    return directories


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the run's directory cannot be written: {error}. "
            "Choose another output_dir (or checkpoint.directory), or change its permissions."
        ) from error
