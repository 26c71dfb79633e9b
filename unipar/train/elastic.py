"""An elastic run as the process sees it that calls ``fit``: before it, and if it is cut off."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from unipar import checkpoint
from unipar.checkpoint.directory import publish
from unipar.checkpoint.names import TEMPORARY
from unipar.config import CheckpointConfig, RunConfig
from unipar.errors import ConfigError, Terminated
from unipar.launch.elastic import REQUEST, Elastic
from unipar.train import directories
from unipar.train.events import EventLog
from unipar.train.handover import holds_whole, newest_left
from unipar.train.job import Job
from unipar.train.preflight import Plan
from unipar.train.unsaid import interrupt_noted
from unipar.utils.devices import device_range
from unipar.utils.logs import logging_to_terminal
from unipar.utils.scratch import scratch

log = logging.getLogger("unipar")

_MEMORY = Path("/dev/shm")
"""Where files are memory, on Linux."""


@contextlib.contextmanager
def changing(job: Job, planned: Plan, directory: Path) -> Iterator[Elastic | None]:
    """How the number of ranks of a run may change, for its length; ``None`` where it does not.

    A signal that ends the run in the block is noted, and with it what a group has left.

    Args:
        job: the run.
        planned: its processes.
        directory: a private one, of files of which there is room for the run's state.
    """
    config = job.config
    wanted = device_range(config.devices)
    with contextlib.ExitStack() as stack:
        stack.enter_context(interrupt_noted(job, starts_here=planned.launcher.starts_here))
        if wanted is None:
            yield None
            return
        stack.enter_context(logging_to_terminal(config.log_level, main=True))
        if planned.launcher.starts_here:
            # Between two groups there is no rank that could hold them.
            stack.enter_context(directories.held(job))
        places = [directory]
        if os.access(_MEMORY, os.W_OK):
            places.insert(0, stack.enter_context(scratch(_MEMORY)))
        requests = job.output_dir / REQUEST
        requests.unlink(missing_ok=True)
        _, devices = planned.launcher.resolve_range(config.device, wanted, config.num_nodes)
        try:
            yield Elastic(
                planned.sizes,
                devices=devices,
                requests=requests,
                places=tuple(places),
                whole=holds_whole(planned.strategy, planned.placement),
                asked=str(wanted),
            )
        except BaseException as error:
            if job.checkpoint_dir is not None and saves_final(config):
                _rescue(places, job.checkpoint_dir, EventLog(job.output_dir), error)
            raise


def _rescue(places: list[Path], directory: Path, events: EventLog, error: BaseException) -> None:
    """Keep among a run's checkpoints what a group has left, and no other one has gone on from."""
    found = newest_left(places)
    kept = checkpoint.newest(directory)
    if found is None or (
        kept is not None and checkpoint.step_of(kept) >= checkpoint.step_of(found)
    ):
        return
    final, temporary = directory / found.name, directory / f"{TEMPORARY}{found.name}"
    try:
        shutil.copytree(found, temporary, dirs_exist_ok=True)
        for file in temporary.rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        publish(temporary, final)
    except OSError as failure:
        log.error("what was handed over cannot be kept in %s: %s", directory, failure)
        return
    step = checkpoint.step_of(final)
    if isinstance(error, (KeyboardInterrupt, Terminated)):
        events.interrupted(error, step)
    log.warning("saved step %d to %s, continue with resume='auto'", step, final)


def resuming_by_itself(config: RunConfig) -> RunConfig:
    """The config of a run whose launcher starts it again with other ranks.

    Raises:
        ConfigError: it has no directory to find its checkpoints in, or none.
    """
    settings = config.checkpoint
    if settings is False:
        raise ConfigError(
            f"devices='{config.devices}', and checkpoint is false: another launcher starts the "
            "processes, and starts them again when their number changes, from the newest "
            "checkpoint. Set checkpoint, such as {'every_steps': 100}."
        )
    assert isinstance(settings, CheckpointConfig)
    if config.output_dir is None and settings.directory is None:
        raise ConfigError(
            f"devices='{config.devices}', and another launcher starts the processes, again when "
            "their number changes: they go on from the run's newest checkpoint, and the run has "
            "no directory of its own. Set output_dir='…' (or checkpoint='…')."
        )
    return config if config.resume is not None else config.model_copy(update={"resume": "auto"})


def saves_final(config: RunConfig) -> bool:
    """Whether a run saves when it ends or is interrupted."""
    return isinstance(config.checkpoint, CheckpointConfig) and config.checkpoint.save_final
