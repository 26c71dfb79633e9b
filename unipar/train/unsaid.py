"""The end of a run that a signal ended before its ranks could note it, nor say where it goes on."""

from __future__ import annotations

import contextlib
import logging
import signal
from collections.abc import Iterator

from unipar import checkpoint
from unipar.errors import Terminated
from unipar.train.events import EventLog
from unipar.train.job import Job
from unipar.train.watching.runs import Run, read_run
from unipar.utils.logs import logging_to_terminal

log = logging.getLogger("unipar")


@contextlib.contextmanager
def interrupt_noted(job: Job, *, starts_here: bool) -> Iterator[None]:
    """Note that a signal has ended the run in the block, if none of its ranks has.

    Args:
        job: the run, whose processes are started in the block and whose directories nobody holds
            any more after it, unless it goes on without this process.
        starts_here: whether none of its processes outlives the block.
    """
    before = read_run(job.output_dir)
    try:
        yield
    except (KeyboardInterrupt, Terminated) as error:
        with logging_to_terminal(job.config.log_level, main=True):
            _note(job, before, error, starts_here=starts_here)
        raise


def _note(job: Job, before: Run, error: BaseException, *, starts_here: bool) -> None:
    now = read_run(job.output_dir)
    began = (now.starts or 0) > (before.starts or 0)
    ended = now.events[-1] if len(now.events) > len(before.events) else {}
    if now.state == "lost":
        # What another machine still has in its queue may not have come to claim the directory.
        unsaid = starts_here or began
    elif now.state == "unknown":
        unsaid = starts_here and began
    else:
        # A start of the run that ends as it goes on from a checkpoint knows of no step, and ranks
        # that have saved name it.
        if now.state == "interrupted" and began and ended.get("step") is None:
            _say_where(job, error)
        return
    if unsaid:
        EventLog(job.output_dir).interrupted(error, step=None)
        _say_where(job, error)


def _say_where(job: Job, error: BaseException) -> None:
    what = (
        f"{error.signal.name}: stopped"
        if isinstance(error, Terminated) and error.signal != signal.SIGINT
        else "interrupted"
    )
    newest = None if job.checkpoint_dir is None else checkpoint.newest(job.checkpoint_dir)
    log.warning(
        "%s before all ranks had saved; %s",
        what,
        f"the newest checkpoint is {newest}, continue with resume='auto'"
        if newest
        else "nothing was saved",
    )
