"""What each rank of a pipeline does, and when, by the schedules of torch.distributed.pipelining.

Torch's schedules give tables of passes. They ask for numbers of micro-batches that the last batch
of an epoch need not have: a table is made for the next number that will do, and the passes of
micro-batches that are not there are left out of it, with what would be sent for them.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from unipar.engine import bubble_of
from unipar.errors import ConfigError
from unipar.utils.torch_versions import actions_within, kind_of

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble", "dualpipev"]

STYLES: dict[str, str] = {"zero-bubble": "v", "dualpipev": "v"}
"""Schedules whose stages go there and back over the ranks; those of others go around."""
SPLITTING = frozenset(STYLES)
"""Schedules that compute the gradients of inputs and of weights at different times."""


class Action(NamedTuple):
    """One thing that a rank does.

    Attributes:
        kind: a pass ``F`` (forward), ``B`` (backward), ``I`` or ``W`` (backward for inputs, or for
            weights, alone); or ``SEND_F``, ``RECV_F``, ``SEND_B``, ``RECV_B``.
        stage: whose pass it is, or which one sends or receives.
        microbatch: the number of the micro-batch.
    """

    kind: str
    stage: int
    microbatch: int


def num_virtual(schedule: str, given: int | None) -> int:
    """How many stages a rank has.

    Raises:
        ValueError: the schedule takes another number.
    """
    fixed = {"gpipe": 1, "1f1b": 1, "zero-bubble": 2, "dualpipev": 2}.get(schedule)
    if fixed is None:
        if given == 1:
            raise ValueError(
                "schedule='interleaved' with virtual_stages=1 is '1f1b'. Set virtual_stages to 2 "
                "or more, or schedule='1f1b'"
            )
        return given or 2
    if given is not None and given != fixed:
        raise ValueError(
            f"schedule='{schedule}' has {fixed} stage{'s' if fixed > 1 else ''} on each rank, and "
            f"virtual_stages={given} was given. Leave it out, or use schedule='interleaved'"
        )
    return fixed


@functools.cache
def order_of(
    schedule: ScheduleName, pp: int, virtual: int, microbatches: int, rank: int, *, training: bool
) -> tuple[Action, ...]:
    """What a rank does in one batch.

    Args:
        schedule: by name.
        pp: how many ranks hold stages.
        virtual: how many stages each has.
        microbatches: of the batch.
        rank: its place along ``pp``, counted from the rank that has the first stage.
        training: whether there are backward passes.

    Raises:
        ConfigError: this torch has no such schedule.
    """
    schedules, merge_passes, add_transfers = _torch_schedules()
    style = STYLES.get(schedule, "loop")
    stages = pp * virtual

    def rank_of(stage: int) -> int:
        return stage % pp if style == "loop" else min(stage, stages - 1 - stage)

    table = _table(schedules, schedule, pp, virtual, microbatches, rank_of)
    kept: dict[int, list[Any]] = {}
    for place, actions in table.items():
        flat = [part for one in actions if one is not None for part in actions_within(one)]
        # Besides passes there are marks of when FSDP is to reduce.
        passes = "FBIW" if training else "F"
        flat = [one for one in flat if kind_of(one) in passes]
        if schedule == "1f1b":
            flat = _renumbered(flat)
        flat = [one for one in flat if one.microbatch_index < microbatches]
        kept[place] = merge_passes(flat)
    found = add_transfers(kept, rank_of, stages)
    return tuple(Action(kind_of(one), one.stage_index, one.microbatch_index) for one in found[rank])


def bubble(schedule: ScheduleName, pp: int, virtual: int, microbatches: int) -> float | None:
    """The share of a step that each rank idles, by the formula; ``None`` where none is known.

    Args:
        schedule: by name.
        pp: how many ranks hold stages.
        virtual: how many stages each has.
        microbatches: of the step.
    """
    if schedule in SPLITTING or (schedule == "interleaved" and microbatches % pp):
        return None
    return bubble_of(pp, microbatches, virtual)


def _table(
    schedules: Any, name: str, pp: int, virtual: int, microbatches: int, rank_of: Any
) -> dict[int, list[Any]]:
    """The passes of all ranks, of at least so many micro-batches."""
    stages = pp * virtual
    held = [_Place(stage, stages, pp) for stage in range(stages) if rank_of(stage) == 0]
    if name in ("gpipe", "1f1b"):
        # Fewer micro-batches than stages are all in flight at once, under either.
        kind = schedules.ScheduleGPipe if name == "gpipe" else schedules.Schedule1F1B
        made = kind(held[0], max(microbatches, pp), loss_fn=_no_loss)
    elif name == "interleaved":
        rounds = max(1, -(-microbatches // pp))
        made = schedules.ScheduleInterleaved1F1B(held, rounds * pp, loss_fn=_no_loss)
    elif name == "zero-bubble":
        made = schedules.ScheduleZBVZeroBubble(held, microbatches, loss_fn=_no_loss)
    else:
        made = schedules.ScheduleDualPipeV(held, max(microbatches, stages), loss_fn=_no_loss)
    return made.pipeline_order


def _renumbered(actions: list[Any]) -> list[Any]:
    """A rank's passes under 1F1B, whose forward passes are in their order.

    The last rank's are counted from 1 (torch 2.13, distributed/pipelining/schedules.py,
    Schedule1F1B._get_pipeline_order, which torch itself only draws pictures from).
    """
    numbers = itertools.count()
    return [
        one._replace(microbatch_index=next(numbers)) if kind_of(one) == "F" else one
        for one in actions
    ]


class _Place:
    """What torch's schedules ask of a stage when they make their tables.

    (torch 2.13, distributed/pipelining/schedules.py.)
    """

    def __init__(self, stage: int, num_stages: int, pp: int) -> None:
        self.stage_index, self.num_stages, self.group_size = stage, num_stages, pp
        self.group_rank, self.is_first, self.is_last = 0, stage == 0, stage == num_stages - 1
        self.submod, self.stage_index_to_group_rank = nn.Identity(), {}
        self.has_backward = True


def _no_loss(*_: Any) -> torch.Tensor:
    raise AssertionError("tables are made, and not run")


def _torch_schedules() -> tuple[Any, Any, Any]:
    try:
        from torch.distributed.pipelining import schedules

        # torch 2.13, distributed/pipelining/schedules.py.
        merge_passes, add_transfers = schedules._merge_bw, schedules._add_send_recv
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"mesh: pp needs the schedules of torch.distributed.pipelining as torch 2.8 to 2.15 "
            f"have them, and torch {torch.__version__} lacks {error}. Install one of these, or "
            "leave pp out."
        ) from error
    return schedules, merge_passes, add_transfers
