"""Samples that ``drop_last`` leaves out."""

from __future__ import annotations

from unipar.migrate.literals import argument, constant
from unipar.migrate.loaders import LOADER
from unipar.migrate.plan import Plan


def warn_of_dropped(plan: Plan) -> None:
    """Call out samples that are never used; tell of those that other epochs use."""
    for _, call in plan.calls(*LOADER):
        if constant(argument(call, 8, "drop_last")) is not True:
            continue
        size = argument(call, 1, "batch_size")
        value = constant(size)
        most = f"{value - 1}" if isinstance(value, int) else "batch_size - 1"
        shuffle = argument(call, 2, "shuffle")
        chosen = argument(call, 3, "sampler") or argument(call, 4, "batch_sampler")
        if chosen is None and (shuffle is None or constant(shuffle) is False):
            plan.warn(
                call,
                f"drop_last without shuffling leaves the same samples out of every epoch: the last "
                f"ones, up to {most}.",
                "Kept as it is; shuffle, or leave drop_last out.",
            )
        else:
            plan.tell(call, f"drop_last leaves up to {most} samples out of each epoch, as before.")
