"""The error message for failed workers: one screen, the cause first."""

from __future__ import annotations

import re
import time
from typing import Protocol

from unipar.errors import WorkerError
from unipar.launch.blame import Kind
from unipar.launch.failure import Failure, shorten_stack
from unipar.launch.group import WorkerGroup
from unipar.launch.rank_names import ADVICE, SAME, behind, in_step, name_ranks, seen
from unipar.launch.rundir import Attempt
from unipar.utils.progress_marks import read_mark

_LOG_LINES = 10
# Numpy, torch on the CPU and torch on a GPU each say it in a way of their own.
_MEMORY = re.compile(r"MemoryError|out of memory|can't allocate memory|SIGKILL")
# How gloo of torch 2.13 ends a process that has met another one in a different collective.
_APART = re.compile(r"gloo::EnforceNotMet.*op\.preamble\.length", re.DOTALL)


class Ranks(Protocol):
    """The processes of a run, as far as a report on one of them goes."""

    @property
    def size(self) -> int: ...

    @property
    def attempt(self) -> Attempt: ...

    def finished(self) -> list[int]: ...


def failed(group: Ranks, failure: Failure) -> WorkerError:
    """The error for a rank that failed by itself."""
    mark = failure.mark or read_mark(group.attempt.mark(failure.rank))
    lines = [f"Rank {failure.rank} of {group.size} {in_step('failed', mark)}: {failure.title}"]
    if failure.kind.is_echo:
        finished = group.finished()
        if finished:
            lines.append(
                f"It was in a collective that {name_ranks(finished)} did not take part in, having "
                f"already returned. {SAME}."
            )
    if _MEMORY.search(failure.title):
        lines.append("If memory ran out, use a smaller micro_batch_size or a sharded strategy.")
    if failure.traceback:
        lines += ["", f"Traceback of rank {failure.rank} (most recent call last):"]
        lines.append(failure.traceback)
    last_output = log_tail(group, failure.rank)
    if _APART.search("\n".join(last_output)):
        lines.append(
            f"The ranks were in different collectives. {SAME}: where gradients are divided, every "
            "rank has to use the same parameters of the model in a step."
        )
    lines += last_output
    return WorkerError(
        "\n".join(lines),
        rank=failure.rank,
        step=mark.step if mark else None,
        worker_traceback=failure.traceback,
    )


def ended(group: WorkerGroup, failure: Failure) -> str:
    """Describe a rank that a signal has ended before it could save with the others."""
    mark = read_mark(group.attempt.mark(failure.rank))
    line = f"Rank {failure.rank} of {group.size} {in_step('ended', mark)}: it {failure.title}."
    return "\n".join([line, *log_tail(group, failure.rank)])


def hung(group: WorkerGroup, failures: list[Failure], missing: list[int]) -> WorkerError:
    """The error for ranks that waited in a collective for others that never came."""
    waiting = sorted(failure.rank for failure in failures)
    waited = read_mark(group.attempt.mark(waiting[0]))
    if any(failure.kind is not Kind.LOST for failure in failures):
        how = f"{in_step('waited', waited)} for {group.timeout:g} s in a collective"
    else:
        how = in_step("lost its connection", waited)
    who = f"{name_ranks(missing).capitalize()} of {group.size}"
    lines = [f"{who} stopped taking part: {name_ranks(waiting)} {how}."]
    first_stack = ""
    for rank in missing:
        mark = read_mark(group.attempt.mark(rank))
        stack = shorten_stack(group.ask_stack(rank))
        first_stack = first_stack or stack
        where = "it is now here:" if stack else "it does not answer when asked where it is."
        at = f" was {seen(mark, time.monotonic() - mark.time)};" if mark else ":"
        lines += ["", f"Rank {rank}{at} {where}"]
        lines += [stack] if stack else []
        lines += log_tail(group, rank)
    lines += ["", ADVICE]
    own = read_mark(group.attempt.mark(missing[0]))
    return WorkerError(
        "\n".join(lines),
        rank=missing[0],
        step=own.step if own else waited.step if waited else None,
        worker_traceback=first_stack,
    )


def apart(group: WorkerGroup, failures: list[Failure]) -> WorkerError:
    """The error for ranks that are all in a collective, but not in the same one at one time."""
    marks = {rank: read_mark(group.attempt.mark(rank)) for rank in range(group.size)}
    lost = [one.rank for one in failures if one.kind is Kind.LOST]
    rank = behind(marks)
    if rank is None and len(lost) == 1:
        # The others waited longer than it did.
        rank = lost[0]
    where = [f"rank {one.rank} {in_step('failed', marks[one.rank])}" for one in failures]
    who = f"Rank {rank} of {group.size}" if rank is not None else f"A rank of {group.size}"
    lines = [f"{who} came too late, or to another collective: {', '.join(where)}. {ADVICE}"]
    shown = sorted(failures, key=lambda one: (one.rank != rank, one.rank))[:2]
    for one in shown:
        lines += ["", f"Rank {one.rank}: {one.title}", *one.traceback.splitlines()[:-1]]
    mark = marks[shown[0].rank]
    return WorkerError(
        "\n".join(lines),
        rank=rank,
        step=mark.step if mark else None,
        worker_traceback=shown[0].traceback,
    )


def log_tail(group: Ranks, rank: int) -> list[str]:
    """The last lines that a rank has printed, under a heading; none for rank 0."""
    path = group.attempt.log(rank)
    if not path.exists():
        return []
    text = path.read_text(errors="replace").strip()
    if not text:
        return []
    return ["", f"Last output of rank {rank}:", *text.splitlines()[-_LOG_LINES:]]
