"""A word on runs whose steps are all left out, and that would end as if they had trained."""

from __future__ import annotations

import logging

log = logging.getLogger("unipar")

_MANY = 50
"""Steps in a row that are told of. A scale of fp16 losses that begins at 65,536 and is halved each
time has found its place long before."""


class Skips:
    """Counts the steps of an engine that are left out in a row.

    Args:
        tells: whether this rank says so.
    """

    def __init__(self, *, tells: bool) -> None:
        self._in_row = 0
        self._taken, self._told = False, not tells

    def add(self, step: int, *, skipped: bool) -> None:
        """Count the step of this number."""
        self._in_row = self._in_row + 1 if skipped else 0
        self._taken |= not skipped
        if self._in_row == _MANY and not self._told:
            self._tell(f"{_MANY} steps in a row, up to step {step},")

    def close(self) -> None:
        """Look at the whole of them, at the end."""
        if self._in_row > 1 and not self._taken and not self._told:
            self._tell(f"all {self._in_row} steps")

    def _tell(self, which: str) -> None:
        self._told = True
        log.warning(
            "%s were left out, for their loss or gradient was not finite: the model has learned "
            "nothing in them. In fp16, let the scale of losses fall (a loss_scale with factors of "
            "1 never does), or train in bf16; else lower the learning rate and look at the data.",
            which,
        )
