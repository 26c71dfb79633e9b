"""What the user is told when workers fail: one screen, the cause first."""

from __future__ import annotations

import re
import time

from unipar.errors import WorkerError
from unipar.launch.failure import Failure, Kind, shorten_stack
from unipar.launch.group import WorkerGroup
from unipar.launch.progress import Mark, read_mark

_LOG_LINES = 10
# Numpy, torch on the CPU and torch on a GPU each say it in a way of their own.
_MEMORY = re.compile(r"MemoryError|out of memory|can't allocate memory|SIGKILL")


def failed(group: WorkerGroup, failure: Failure) -> WorkerError:
    """The error for a rank that failed by itself."""
    mark = read_mark(group.attempt.mark(failure.rank))
    lines = [f"Rank {failure.rank} of {group.size} {_in_step('failed', mark)}: {failure.title}"]
    if failure.kind is Kind.LOST:
        finished = group.finished()
        if finished:
            lines.append(
                f"It was in a collective that {_ranks(finished)} did not take part in, having "
                "already returned: every rank must run the same collectives."
            )
    if _MEMORY.search(failure.title):
        lines.append("If memory ran out, use a smaller micro_batch_size or a sharded strategy.")
    if failure.traceback:
        lines += ["", f"Traceback of rank {failure.rank} (most recent call last):"]
        lines.append(failure.traceback)
    lines += _log_tail(group, failure.rank)
    return WorkerError(
        "\n".join(lines),
        rank=failure.rank,
        step=mark.step if mark else None,
        worker_traceback=failure.traceback,
    )


def ended(group: WorkerGroup, failure: Failure) -> str:
    """What is said of a rank that a signal has ended before it could save with the others."""
    mark = read_mark(group.attempt.mark(failure.rank))
    line = f"Rank {failure.rank} of {group.size} {_in_step('ended', mark)}: it {failure.title}."
    return "\n".join([line, *_log_tail(group, failure.rank)])


def hung(group: WorkerGroup, waiting: list[int], missing: list[int], timeout: float) -> WorkerError:
    """The error for ranks that waited in a collective for others that never came."""
    waited = read_mark(group.attempt.mark(waiting[0]))
    lines = [
        f"{_ranks(missing).capitalize()} of {group.size} stopped taking part: {_ranks(waiting)} "
        f"{_in_step('waited', waited)} for {timeout:g} s in a collective."
    ]
    first_stack = ""
    for rank in missing:
        mark = read_mark(group.attempt.mark(rank))
        seen = ""
        if mark:
            ago = time.monotonic() - mark.time
            seen = f" in step {mark.step}{_phase(mark)}, {ago:.0f} s ago"
        stack = shorten_stack(group.ask_stack(rank))
        first_stack = first_stack or stack
        where = "it is now here:" if stack else "it does not answer when asked where it is."
        lines += [
            "",
            f"Rank {rank} was last seen{seen}; {where}" if seen else f"Rank {rank}: {where}",
        ]
        lines += [stack] if stack else []
        lines += _log_tail(group, rank)
    lines += [
        "",
        "Every rank must run the same collectives. If the rank was only slow, raise `timeout`.",
    ]
    own = read_mark(group.attempt.mark(missing[0]))
    return WorkerError(
        "\n".join(lines),
        rank=missing[0],
        step=own.step if own else waited.step if waited else None,
        worker_traceback=first_stack,
    )


def _in_step(verb: str, mark: Mark | None) -> str:
    return f"{verb} in step {mark.step}{_phase(mark)}" if mark else f"{verb} before the first step"


def _phase(mark: Mark) -> str:
    return f" ({mark.phase})" if mark.phase else ""


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _log_tail(group: WorkerGroup, rank: int) -> list[str]:
    path = group.attempt.log(rank)
    if not path.exists():
        return []
    text = path.read_text(errors="replace").strip()
    if not text:
        return []
    return ["", f"Last output of rank {rank}:", *text.splitlines()[-_LOG_LINES:]]
