"""Ranks, and where they stand, put in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from unipar.utils.progress_marks import Mark

SAME = "Every rank must run the same collectives, in the same order"
ADVICE = f"{SAME}. If the rank was only slow, raise `timeout`."


def behind(marks: Mapping[int, Mark | None]) -> int | None:
    """The one rank that has come less far than all others, if there is one."""
    order = sorted((mark.count if mark else 0, rank) for rank, mark in marks.items())
    alone = len(order) > 1 and order[0][0] < order[1][0]
    return order[0][1] if alone else None


def seen(mark: Mark, ago: float) -> str:
    """When and where a rank has last said where it is; ``ago`` is in seconds."""
    return f"last seen in step {mark.step}{_phase(mark)}, {ago:.0f} s ago"


def in_step(verb: str, mark: Mark | None) -> str:
    return f"{verb} in step {mark.step}{_phase(mark)}" if mark else f"{verb} before the first step"


def _phase(mark: Mark) -> str:
    return f" ({mark.phase})" if mark.phase else ""


def name_ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
